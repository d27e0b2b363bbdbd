"""An S3 server on the loopback (moto), in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.support import free_port

KEYS = {"AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST", "AWS_SECRET_ACCESS_KEY": "hunter2hunter2", "AWS_REGION": "us-east-1"}


@contextmanager
def s3_bucket(name: str = "bucket") -> Iterator[str]:
    """The address of a new bucket; its server and credentials are in the environment, as on a user's host."""
    for package in ("moto", "s3fs", "flask"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 's3fs' 'moto[server]'")
    port = free_port()
    command = [sys.executable, "-c", "import sys; from moto.server import main; main(sys.argv[1:])"]
    server = subprocess.Popen(
        [*command, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=5):
                break
            time.sleep(0.1)
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=30), pytest.MonkeyPatch.context() as patch:
            for key, value in (KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}).items():
                patch.setenv(key, value)
            yield f"s3://{name}"
    finally:
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()  # the next server of this process has another port
        server.kill()
        server.wait()


def put_tree(folder: os.PathLike[str], url: str) -> None:
    """Copy a folder into the bucket."""
    import s3fs

    s3fs.S3FileSystem(skip_instance_cache=True).put(os.fspath(folder), url, recursive=True)
