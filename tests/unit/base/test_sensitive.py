"""Variables that look like secrets stay at home, and others do not."""

import pytest

from capt.pretrain.base.sensitive import is_secret

NAMES = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "HF_COOKIE"),
    *("AWS_SESSION_TOKEN", "OPENAI_API_KEY", "GITHUB_PAT", "CAPT_PAT", "CAPT_SAS", "CAPT_CREDS", "CAPT_BEARER"),
    *("CAPT_DB_PASS", "CAPT_PASSPHRASE", "CAPT_PWD", "CAPT_SESSION", "CAPT_SLACK_WEBHOOK", "CAPT_ACCESS_KEY_ID"),
    *("NCCL_PASSWD", "NCCL_MY_SECRET", "UCX_PASSWORD", "TORCH_AUTH", "GLOO_PRIVATE_KEY", "CAPT_JWT", "CAPT_DSN"),
    *("CAPT_CREDENTIALS", "CAPT_SIGNATURE", "CAPT_KEY", "CAPT_APIKEY", "CAPT_SSHKEY", "CAPT_OAUTH", "CAPT_HMAC"),
    *("SSHPASS", "ROOT_PW", "NCCL_AUTHKEY", "CAPT_SIGNKEY", "CAPT_PASSKEY", "CAPT_CONNECTION_STRING", "CAPT_MNEMONIC"),
    *("CAPT_SALT", "CAPT_PIN", "CAPT_OTP", "CAPT_NETRC", "CAPT_KEYTAB", "CAPT_PEM", "CAPT_LOGIN", "CAPT_LICENSE"),
)

VALUES = (
    "hf_abcdefghijklmnopqrstuvwxyz",
    "ghp_0123456789abcdefghij",
    "github_pat_11ABCDEFG0123456789",
    "glpat-0123456789abcdefghij",
    "AKIAIOSFODNN7EXAMPLE",
    "sk-proj-0123456789abcdef",
    "xoxb-0123456789-abcdef",
    "AIzaSyA0123456789abcdefghijklmnopqrstu",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln",
    "-----BEGIN OPENSSH PRIVATE KEY-----",
    "https://me:canary@mirror.example",
    "https://me@mirror.example",
    "https://account.blob.example/c?sv=1&sig=abc",
    "0123456789abcdef0123456789abcdef01234567",
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "dckr_pat_0123456789abcdef",
    "glrt-0123456789abcdefghij",
    "nvapi-0123456789abcdef",
    "hvs.CAESI0123456789abcdef",
    "SG.0123456789abcdef.0123456789abcdef",
    "ya29.a0AfB_0123456789",
    "AGE-SECRET-KEY-1QQPQQ0123456789",
    "Bearer 0123456789abcdef",
    "Basic bWU6Y2FuYXJ5",
    "server=db;user=me;password=canary",
    "AccountName=a;AccountKey=canary==",
    '{"token": "canary"}',
)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_it(name: str) -> None:
    assert is_secret(name, "canary")
    assert is_secret(name.lower(), "canary")


@pytest.mark.parametrize("value", VALUES)
def test_a_value_says_it(value: str) -> None:
    assert is_secret("NCCL_DEBUG", value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "true"),
        ("NCCL_IB_PKEY", "0"),
        ("NCCL_IB_HCA", "mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5"),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1"),
        ("UCX_TLS", "rc,cuda_copy,cuda_ipc"),
        ("UCX_KEEPALIVE_INTERVAL", "20s"),
        ("NCCL_TOPO_FILE", "/opt/microsoft/ndv4-topo.xml"),
        ("LD_LIBRARY_PATH", "/nix/store/3n58xw4373jp0ljirf06d8077j15pc4j-glibc-2.37-8/lib:/usr/local/cuda-13.0/lib64"),
        ("PYTHONPATH", "/home/me/projects/contrastive-pretraining-2026"),
        ("HF_ENDPOINT", "https://mirror.example"),
        ("GLOO_SOCKET_IFNAME", "enp129s0f0np0"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("OMP_NUM_THREADS", "8"),
    ],
)
def test_settings_are_no_secrets(name: str, value: str) -> None:
    assert not is_secret(name, value)
