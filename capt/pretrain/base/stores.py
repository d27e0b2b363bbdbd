"""Files in object stores and on web servers, through ``fsspec``: listed, read by ranges, copied and written.

Every request has a time limit, and is repeated after a pause where the store fails or throttles. What a store must not
do is noticed and named: an object that is gone, shorter than the store says, or replaced while it is read.

Credentials come from the host's own chain alone (environment, profiles, roles, ``~/.config/fsspec``). An address that
holds some is refused, and no message shows the user or the query of an address.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import random
import re
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from capt.pretrain.base.errors import DataError, how_to_install
from capt.pretrain.base.files import SMALL
from capt.pretrain.base.sensitive import has_secret, says_secret

logger = logging.getLogger(__name__)
_own_random = random.SystemRandom()  # that of a job must not be drawn from
T = TypeVar("T")

STORES: dict[str, tuple[str, str]] = {
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "az": ("adlfs", "azure"),
    "abfs": ("adlfs", "azure"),
    "hf": ("huggingface_hub", "models"),
    "https": ("aiohttp", "https"),
    "http": ("aiohttp", "https"),
}
"""The beginning of an address -> the package that reads such a store, and the extra that installs it."""
_WEB = ("http", "https")
WRITABLE = ("s3", "gs", "gcs", "az", "abfs")
"""Stores that can be written to."""

ATTEMPTS = 6
"""Requests for the same bytes; the pauses between them add up to about half a minute."""
TIMEOUT = 60.0
"""Seconds in which a request of at most `CHUNK` bytes is answered."""
_FIRST_PAUSE = 1.0
CHUNK = 8 << 20
"""Bytes of a request."""
_AHEAD = 4
"""Requests at a time."""
_SMALL, _SMALL_AHEAD = CHUNK // 4, 16
"""Bytes of a file that is fetched as a whole ahead of those who read it, and how many are: what they wait for is the
store's answer, not the bytes."""
_MOST_WHOLE = 8 * CHUNK
"""Bytes of a file that is read from a server which sends it whole for each request."""
_MOST_PARTS = 10_000
"""Parts of a file that S3 takes."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_AZURE = re.compile(r"(?<![\w+.-])(abfs|az)://([\w$-]+)@([a-z0-9]+\.dfs\.core\.windows\.net)(?![\w.@-])", re.IGNORECASE)
"""Azure's addresses name the container where those of others name a user."""
_USER = re.compile(r"(?<=://)(?![\w$-]+@[a-z0-9]+\.dfs\.core\.windows\.net(?![\w.@-]))[^/\s@'\"]*@", re.IGNORECASE)
_QUERY = re.compile(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", re.IGNORECASE)
_TAGS = ("ETag", "generation", "etag", "md5Hash", "blob_id", "Last-Modified", "last_modified", "mtime", "created")
_STATUS = ("status", "status_code", "code")
"""Attributes of errors that hold the status of the answer: of aiohttp, azure, gcsfs; or of their ``response``."""
_REFUSALS = ("Credential", "Authentication", "SigningError")
_QUIET = ("azure", "botocore", "aiobotocore", "google", "urllib3", "httpx", "httpx2", "httpcore", "httpcore2")
_CHATTER = {**dict.fromkeys(_QUIET, logging.WARNING), "gcsfs": logging.CRITICAL}
"""Libraries that log every request, with its headers or its signed address, or a stack trace of each failed one, and
the level that they are kept to."""
_CLIENT_ERRORS = (400, 402, 404, 405, 406, 407, 410, 411, 413, 414, 415, 416, 422, 451, 501, 505)
_LASTING_ERRNOS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP),
    *(errno.EINVAL, errno.ENAMETOOLONG, errno.ENXIO, errno.ENODEV, errno.EFBIG),
)
"""Errors of a name, or of a permission: of a file system, or of S3 as s3fs writes its answers."""
_LASTING = ("HfUriError", "HFValidationError", "InvalidURL", "ParamValidationError", "TooManyRedirects")
"""Errors of libraries that another attempt meets again: an address that cannot be one, or that leads to itself."""


def is_url(text: str | os.PathLike[str]) -> bool:
    """Return whether a text is the address of a file in a store, and no path."""
    return isinstance(text, str) and _URL.match(text) is not None


def check_url(url: str) -> str:
    """Return the address of a file in a known store, or a pattern of such.

    Raises:
        ValueError: there is no such store, it names no file, or it holds a user, a password or a signature.
    """
    found = _URL.match(url)
    assert found is not None
    scheme = found[1].lower()
    if scheme not in STORES:
        raise ValueError(f"is a URL of an unknown store; known: {', '.join(f'{name}://' for name in STORES)}")
    rest = _AZURE.sub(r"\1://\3", url)[found.end() :]
    query = rest.partition("?")[2] if scheme in _WEB else ""
    names = [part.partition("=")[0] for part in query.split("&")]
    if "@" in rest.partition("/")[0] or any(map(says_secret, names)) or has_secret(url):
        raise ValueError(
            "holds a user, a password or a signature, which would be written into the run folder: they belong to the "
            "environment, a profile or a role of the host"
        )
    if not rest.strip("/"):
        raise ValueError("names no file in the store")
    if "?versionId=" in rest:
        raise ValueError("names a version of an object: only the newest one is read; copy the one that is meant")
    return f"{scheme}{url[len(scheme) :]}"


def without_secrets(text: str) -> str:
    """A text without the users of the addresses in it, and the queries of those on web servers."""
    if "://" in text:
        text = _QUERY.sub(r"\1", _USER.sub("", text))
    return "(not shown: it holds a secret)" if has_secret(text) else text


@dataclass(frozen=True)
class StoreFile:
    """A file in a store as it was found: its address, its bytes, and what the store changes when the file changes."""

    url: str
    size: int
    tag: str

    def __str__(self) -> str:
        return without_secrets(self.url)

    @property
    def name(self) -> str:
        """The last part of the address."""
        return str(self).rstrip("/").rpartition("/")[2]

    @property
    def is_small(self) -> bool:
        """True for a file that `contents_of` takes."""
        return self.size <= _SMALL


def look_up(url: str) -> StoreFile:
    """The file at ``url``. Raises ``DataError`` where there is none, or the store does not answer."""
    # the hub's file system would answer from its memory, and by listing a whole folder
    options = {"refresh": True, "expand_info": True} if _scheme(url) == "hf" else {}
    info = _request(url, "looked up", lambda fs: fs.info(_inner(url, fs), **options))
    return _store_file(url, info)


def exists(url: str) -> bool:
    """Return whether there is a file at ``url``. Raises ``DataError`` where the store does not answer."""
    try:
        return look_up(url).size >= 0
    except MissingError:
        return False


def listed(pattern: str) -> list[StoreFile]:
    """The files that an address or a pattern of addresses (``*``, ``**``, ``?``, ``[...]``) names, sorted.

    Raises ``DataError`` where there are none, or the store does not answer.
    """
    on_web = _scheme(pattern) in _WEB
    if not any(sign in pattern for sign in ("*[" if on_web else "*?[")):
        return [look_up(pattern)]
    if "*" not in pattern:  # the name of a file may have such signs
        with suppress(DataError):
            return [look_up(pattern)]
    # without folders: one of the name of a file would be listed in its place
    options = {} if on_web else {"withdirs": False, **_fresh(pattern)}
    found = _request(pattern, "listed", lambda fs: fs.glob(_inner(pattern, fs), detail=True, **options))
    names = {_address(pattern, name): info for name, info in sorted(found.items()) if not _is_folder(name, info)}
    files = [look_up(url) if on_web else _store_file(url, info) for url, info in names.items()]
    if not files:
        raise MissingError(f"{without_secrets(pattern)}: no file of the store matches")
    return files


def read_small(url: str, *, limit: int = SMALL) -> bytes:
    """The content of a file of at most ``limit`` bytes. Raises ``DataError``."""
    file = look_up(url)
    if file.size > limit:
        raise DataError(f"{file}: over {limit:,} bytes, which is the most that is read of such a file")
    return b"".join(chunks(file))


def chunks(file: StoreFile) -> Iterator[bytes]:
    """The content of a file in order, some requests at a time.

    Raises:
        DataError: the file is gone, shorter than it was said to be, or another one by now; the store refuses it, or
            keeps failing.
    """
    begins = range(0, file.size, CHUNK)
    yield from _in_turn((partial(read_range, file, begin, min(begin + CHUNK, file.size)) for begin in begins), _AHEAD)
    # After the last byte, so that none can be of another file.
    require_unchanged(file)


def copy_to(file: StoreFile, out: IO[bytes]) -> str:
    """Write the content of a file to ``out``; its SHA-256, in hexadecimal. Raises ``DataError`` as `chunks`."""
    digest = sha256()
    for chunk in chunks(file):
        digest.update(chunk)
        out.write(chunk)
    return digest.hexdigest()


def contents_of(files: Sequence[StoreFile]) -> Generator[bytes]:
    """The content of each of some small files, in order, fetched some files ahead. Raises ``DataError`` as `chunks`."""
    assert all(file.is_small for file in files)
    return _in_turn((partial(_whole, file) for file in files), min(_SMALL_AHEAD, len(files)))


def _whole(file: StoreFile) -> bytes:
    content = read_range(file, 0, file.size)
    require_unchanged(file)
    return content


def _in_turn(requests: Iterator[Callable[[], bytes]], at_once: int) -> Generator[bytes]:
    """Yield the results of requests in their order; at most ``at_once`` run, or wait to be taken."""
    waiting: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(max(1, at_once)) as pool:
        try:
            waiting.extend(map(pool.submit, islice(requests, at_once)))
            while waiting:
                content = waiting.popleft().result()
                # The next request begins before the caller works on this answer.
                waiting.extend(map(pool.submit, islice(requests, 1)))
                yield content
        finally:
            for request in waiting:
                request.cancel()


def read_range(file: StoreFile, begin: int, end: int) -> bytes:
    """Bytes ``begin .. end-1`` of a file. Raises ``DataError``, also where the store gives another number of bytes."""
    # the hub's file system would look the file up, and read ahead, for each request
    options = {"size": file.size, "cache_type": "none"} if _scheme(file.url) == "hf" else {}

    def read(fs: Any) -> bytes:
        content: bytes = fs.cat_file(_inner(file.url, fs), start=begin, end=end, **options)
        if len(content) == file.size > end - begin:  # a web server without ranges sends the whole file
            if file.size > _MOST_WHOLE:
                raise DataError(
                    f"{file}: the server sends no parts of a file, and {file.size:,} bytes are too many to be sent for "
                    "each of them; download it, or use a server that answers ranges"
                )
            return content[begin:end]
        if len(content) != end - begin:
            raise _TruncatedError(f"it gave {len(content):,} bytes, and not the {end - begin:,} asked for")
        return content

    return _request(file.url, "read", read)


def require_unchanged(file: StoreFile) -> None:
    """Raise ``DataError`` if the store has another file at the address by now."""
    now = look_up(file.url)
    if (now.size, now.tag) != (file.size, file.tag):
        raise DataError(f"{file}: the file was replaced in the store while it was read; start again")


def reader(file: StoreFile, content: bytes = b"") -> io.BufferedReader:
    """The file as a seekable binary stream; ``content`` is given where it was fetched already.

    Reading raises ``DataError``, as `read_range`.
    """
    return io.BufferedReader(_Ranges(file, content))


class _Ranges(io.RawIOBase):
    """Requests of `CHUNK` bytes, whatever is asked for at a time: a reader of lines asks for 8 KiB."""

    def __init__(self, file: StoreFile, held: bytes) -> None:
        self._file, self._at = file, 0
        self._begin, self._held = 0, held
        self.name, self.mode = str(file), "rb"

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._file.size:
            return 0
        if not self._begin <= self._at < self._begin + len(self._held):
            self._begin, self._held = self._at, b""  # no two chunks are held
            self._held = read_range(self._file, self._at, min(self._at + CHUNK, self._file.size))
        content = memoryview(self._held)[self._at - self._begin :][: len(buffer)]
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def put_file(path: Path, url: str) -> None:
    """Write a local file to the address ``url``. Raises ``DataError`` where the store refuses it or keeps failing."""
    size = path.stat().st_size
    # `TIMEOUT` is that of one chunk.
    limit = TIMEOUT * (1 + size / CHUNK)
    options = {}
    if _scheme(url) == "s3":  # which would have 500 MB of the file in memory
        options = {"chunksize": max(2 * CHUNK, -(-size // _MOST_PARTS)), "max_concurrency": _AHEAD}
    try:
        _request(url, "written", lambda fs: fs.put_file(str(path), _inner(url, fs), **options), limit=limit)
    except MissingError:
        path.stat()  # it is the local file that is missing
        raise
    _require_written(url, size)


def put_bytes(content: bytes, url: str) -> None:
    """Write ``content`` to the address ``url``. Raises ``DataError`` as `put_file`."""
    limit = TIMEOUT * (1 + len(content) / CHUNK)
    _request(url, "written", lambda fs: fs.pipe_file(_inner(url, fs), content), limit=limit)
    _require_written(url, len(content))


def _require_written(url: str, size: int) -> None:
    if (found := look_up(url)).size != size:
        raise DataError(f"{found}: the store holds {found.size:,} bytes of the {size:,} that were written")


def tree(url: str) -> list[StoreFile]:
    """All files under the address ``url``, sorted; none where nothing is there. Raises ``DataError``."""
    try:
        found = _request(url, "listed", lambda fs: fs.find(_inner(url, fs), detail=True, **_fresh(url)))
    except MissingError:
        return []
    if isinstance(found, list):  # adlfs gives the names alone where the address is a file's
        return [look_up(_address(url, name)) for name in found]
    # s3fs gives the folder itself where its first file comes while it is listed
    files = [(name, info) for name, info in sorted(found.items()) if not _is_folder(name, info)]
    return [_store_file(_address(url, name), info) for name, info in files]


def remove_tree(url: str) -> None:
    """Remove all files under the address ``url``. Raises ``DataError``."""

    def remove(file: StoreFile) -> None:
        with suppress(MissingError):
            _request(file.url, "removed", lambda fs: fs.rm_file(_inner(file.url, fs)))

    with ThreadPoolExecutor(_AHEAD) as pool:  # not by `rm`, which takes ? and [ of a name for a pattern
        list(pool.map(remove, tree(url)))


class MissingError(DataError):
    """There is no such file in the store."""


class _TruncatedError(OSError):
    """A store gave another number of bytes than it was asked for."""


def _request(url: str, done: str, ask: Callable[[Any], T], *, limit: float | None = None) -> T:
    """Ask the file system of ``url``, again after a pause while the store fails; return its answer."""
    name = without_secrets(url)
    pause, problem = _FIRST_PAUSE, ""
    for attempt in range(ATTEMPTS):
        try:
            return _within(TIMEOUT if limit is None else limit, lambda: ask(_file_system(url)))
        except DataError:
            raise
        except ImportError as error:
            raise _not_installed(name, error) from error
        except Exception as raised:
            failure = _cause(raised)
            status = _status(failure)
            if isinstance(failure, FileNotFoundError) or (done == "written" and status == 404):
                if done == "written":
                    raise MissingError(
                        f"{name} could not be written: the store has no bucket or container of that name"
                    ) from None
                raise MissingError(f"{name} does not exist in the store") from None
            text = _in_words(failure)
            if isinstance(failure, PermissionError) or status in (401, 403) or _is_refusal(failure):
                raise DataError(
                    f"{name}: the store refuses access ({text}); the credentials of this host (environment, profile "
                    "or role) lack, have expired, or do not allow it"
                ) from None
            if status in _CLIENT_ERRORS or isinstance(failure, ssl.CertificateError) or _is_lasting(failure):
                raise DataError(f"{name} could not be {done}: {text}") from None
            # A fault of a program, which another attempt would meet again.
            if isinstance(failure, (AssertionError, AttributeError, NameError, TypeError)):
                raise
            problem = text
        if attempt + 1 < ATTEMPTS:
            logger.warning("%s could not be %s (%s); trying again in %.0f s", name, done, problem, pause)
            time.sleep(pause * (0.5 + _own_random.random()))  # many hosts must not come back together
            pause *= 2
    given_up = DataError(f"{name} could not be {done} in {ATTEMPTS} attempts: {problem}")
    given_up.passing = True
    raise given_up


def _cause(error: Exception) -> BaseException:
    """The error itself, or what fsspec has made a missing file of: every answer of a web server but a good one."""
    cause = error.__cause__
    of_client = type(cause).__module__.startswith("aiohttp") and getattr(cause, "status", None) not in (404, 410)
    if isinstance(error, FileNotFoundError) and cause is not None and (of_client or isinstance(cause, TimeoutError)):
        return cause
    return error


def _status(error: BaseException) -> int | None:
    """The status of the answer that an error is of, as its library says it."""
    values = (getattr(part, key, None) for part in (error, getattr(error, "response", None)) for key in _STATUS)
    return next((value for value in values if isinstance(value, int)), None)


def _is_lasting(error: BaseException) -> bool:
    if isinstance(error, NotImplementedError) or getattr(error, "errno", None) in _LASTING_ERRNOS:
        return True
    return type(error) is ValueError or any(kind.__name__ in _LASTING for kind in type(error).__mro__)


def _is_refusal(error: BaseException) -> bool:
    """Return whether an error says, by its kind or its words, that the credentials do not suffice."""
    if type(error).__name__ == "RefreshError":  # of google-auth
        return not getattr(error, "retryable", False)
    return (
        any(word in type(error).__name__ for word in _REFUSALS)
        or (isinstance(error, OSError) and str(error).startswith("Forbidden: "))  # gcsfs, in place of a status
        or (type(error) is ValueError and "with credentials" in str(error))  # adlfs, where the host names no account
    )


def _in_words(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    words = " ".join(without_secrets(str(error)).partition("RequestId:")[0].split())[:200]  # Azure's words end there
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of ``call``; ``TimeoutError`` after ``seconds``, with the call left behind in its thread."""
    outcome: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer in {seconds:g} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _file_system(url: str) -> Any:
    import fsspec

    for name, level in _CHATTER.items():
        # A level that the user has set stays.
        if (library := logging.getLogger(name)).level == logging.NOTSET:
            library.setLevel(level)
    scheme = _scheme(url)
    if scheme == "hf":
        return _hub()
    # A remembered listing would hide what has changed since.
    options: dict[str, Any] = {"use_listings_cache": False}
    if _AZURE.match(url):
        options |= fsspec.get_filesystem_class(scheme)._get_kwargs_from_urls(url)  # the account
    if scheme == "s3":
        # One attempt of the library: `_request` repeats, and logs that it does.
        options["config_kwargs"] = {"connect_timeout": 10, "read_timeout": TIMEOUT, "retries": {"max_attempts": 1}}
    found = fsspec.filesystem(scheme, **options)
    if scheme in ("az", "abfs") and (config := getattr(found.service_client, "_config", None)) is not None:
        # Azure's library would repeat a failed request for over `TIMEOUT`, so that its status were never seen
        config.retry_policy.total_retries = 0
    return found


@cache
def _hub() -> Any:
    """The file system of ``hf://``: one for all threads, each of which would ask anew whether a repository exists."""
    import fsspec

    return fsspec.filesystem("hf", skip_instance_cache=True)


def _fresh(url: str) -> dict[str, bool]:
    """The option by which a file system lists anew what it has listed before."""
    return {"refresh": True} if _scheme(url) == "hf" else {}


def _scheme(url: str) -> str:
    return url.partition("://")[0].lower()


def _inner(url: str, fs: Any) -> str:
    if _scheme(url) in _WEB:  # what follows # would not be sent
        url = url.replace("#", "%23")
    return str(fs._strip_protocol(url))


def _address(asked: str, name: str) -> str:
    """The address of what a listing of ``asked`` calls ``name``."""
    if is_url(name):
        return name
    name = name.lstrip("/")
    if account := _AZURE.match(asked):
        return f"{account[0]}/{name.partition('/')[2]}"
    return f"{asked.partition('://')[0]}://{name}"


def _is_folder(name: str, info: dict[str, Any]) -> bool:
    """Return whether an entry of a list is a folder, or the empty object by which a bucket has one."""
    return info.get("type") == "directory" or (name.endswith("/") and not info.get("size"))


def _store_file(url: str, info: dict[str, Any]) -> StoreFile:
    if _is_folder(str(info.get("name", "")), info):
        raise DataError(
            f"{without_secrets(url)} is a folder of the store; name its files, for example {url.rstrip('/')}/*.txt"
        )
    end = urlsplit(str(info.get("url", url)))
    if info.get("mimetype") == "text/html" and end.path.rpartition("/")[2] != urlsplit(url).path.rpartition("/")[2]:
        raise DataError(
            f"{without_secrets(url)} leads to a web page, {without_secrets(end.geturl())}, as where a login is needed: "
            "download the file"
        )
    if info.get("size") is None:
        raise DataError(f"{without_secrets(url)}: the server does not say how long the file is; download it")
    tag = next((str(info[key]) for key in _TAGS if info.get(key) is not None), "")
    return StoreFile(url, int(info["size"]), tag)


def _not_installed(name: str, error: ImportError) -> DataError:
    package, extra = STORES.get(_scheme(name), (str(error.name or error), ""))
    return DataError(f"{name}: the package {package} is not installed: {how_to_install(extra) if extra else error}")
