"""HTTPS by the server itself: with a certificate that the test makes and trusts, by httpx and by our client."""

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trainhouse
from trainhouse.server.config import ConfigError
from trainhouse.server.process import StartError, check_certificate

from ..live import LiveServer, live_server, save_byte_tokenizer
from .real import MODEL, server_config


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return made(tmp_path_factory.mktemp("tls"), "server")


def made(directory: Path, name: str, *options: str) -> tuple[Path, Path]:
    """A certificate for this machine, signed by itself, and its key."""
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "1", *subject]
    files = ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run([*command, *files, *(options or ("-nodes",))], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def server(
    certificate: tuple[Path, Path], tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    model = tmp_path_factory.mktemp("model") / "qwen3"
    shutil.copytree(tiny_models["qwen3"], model)
    save_byte_tokenizer(model)
    files = {"tls_certificate": certificate[0], "tls_key": certificate[1]}
    with live_server({MODEL: model}, tmp_path_factory.mktemp("state"), **files) as running:
        yield running


def test_who_trusts_the_certificate_is_served(server: LiveServer, certificate: tuple[Path, Path]) -> None:
    assert server.url.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    with httpx.Client(base_url=server.url, verify=trusting) as client:
        assert client.get("/api/v1/healthz").status_code == 200
        files = client.get(f"/api/v1/models/{MODEL}/tokenizer", headers={"X-API-Key": "tml-me"}).json()["files"]
        assert files["tokenizer.json"].startswith(server.url), "what it says of itself is https, too"
    with httpx.Client(base_url=server.url) as stranger, pytest.raises(httpx.ConnectError, match="self-signed"):
        stranger.get("/api/v1/healthz")


def test_old_versions_of_tls_and_plain_http_are_not_spoken(server: LiveServer, certificate: tuple[Path, Path]) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http") + "/api/v1/healthz")
    old = ssl.create_default_context(cafile=str(certificate[0]))
    with pytest.warns(DeprecationWarning):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with httpx.Client(base_url=server.url, verify=old) as client, pytest.raises(httpx.ConnectError):
        client.get("/api/v1/healthz")


def test_our_client_trusts_what_the_environment_names(
    server: LiveServer, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    with trainhouse.ServiceClient(server.url, "tml-me") as service:
        assert service.get_server_capabilities()


def test_a_certificate_that_cannot_be_served_with_stops_the_start(
    certificate: tuple[Path, Path], tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    whole, key = certificate
    other, _ = made(tmp_path, "other")
    encrypted = made(tmp_path, "encrypted", "-passout", "pass:secret")
    for files in ((other, key), encrypted, (tmp_path / "none.pem", key), (key, key)):
        config = server_config(tiny_models["qwen3"], tmp_path / "state", tls_certificate=files[0], tls_key=files[1])
        with pytest.raises(StartError, match=f"certificate {files[0]} with key .* without a passphrase"):
            check_certificate(config)
    with pytest.raises(ConfigError, match="tls_certificate and tls_key go together"):
        server_config(tiny_models["qwen3"], tmp_path / "state", tls_certificate=whole)
