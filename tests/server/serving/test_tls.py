"""HTTPS served by the server itself, with a certificate authority that the test creates, for httpx, our client and the
SDK."""

import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trainhouse
from trainhouse.server.config.option_values import ConfigError
from trainhouse.server.files.state_lock import StartError
from trainhouse.server.serving.server_process import check_certificate

from ...live import LiveServer, live_server, save_byte_tokenizer
from ..real import MODEL, server_config

pytestmark = pytest.mark.slow

SDK_SCRIPT = """
import sys, tinker
rest = tinker.RestClient(base_url=sys.argv[1], api_key="tml-me")
print(*(model.model_name for model in rest.get_server_capabilities().result(30).supported_models))
"""


@dataclass(frozen=True)
class Files:
    """A certificate and its key, and the authority that clients trust."""

    authority: Path
    certificate: Path
    key: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return made(tmp_path_factory.mktemp("tls"))


def made(directory: Path, *options: str) -> Files:
    """Creates an authority, and a certificate by it for this machine.

    options: openssl options for the certificate's key.
    """
    directory.mkdir(exist_ok=True)
    authority, its_key = directory / "authority.pem", directory / "authority.key"
    certificate, key = directory / "server.pem", directory / "server.key"
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "1"]
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-addext"]
    signed = [*subject, "basicConstraints=critical,CA:FALSE", "-CA", str(authority), "-CAkey", str(its_key)]
    for one, its, more in ((authority, its_key, ["-nodes", "-subj", "/CN=authority"]), (certificate, key, signed)):
        more = [*more, *(options or ["-nodes"])] if one == certificate else more
        subprocess.run([*new, "-out", str(one), "-keyout", str(its), *more], check=True, capture_output=True)
    return Files(authority, certificate, key)


@pytest.fixture(scope="module")
def server(
    files: Files, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    model = tmp_path_factory.mktemp("model") / "qwen3"
    shutil.copytree(tiny_models["qwen3"], model)
    save_byte_tokenizer(model)
    options = {"tls_certificate": files.certificate, "tls_key": files.key}
    with live_server({MODEL: model}, tmp_path_factory.mktemp("state"), **options) as running:
        yield running


def test_clients_that_trust_the_certificate_are_served(server: LiveServer, files: Files) -> None:
    assert server.url.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=str(files.authority))
    with httpx.Client(base_url=server.url, verify=trusting) as client:
        assert client.get("/api/v1/healthz").status_code == 200
        listed = client.get(f"/api/v1/models/{MODEL}/tokenizer", headers={"X-API-Key": "tml-me"}).json()["files"]
        assert listed["tokenizer.json"].startswith(server.url), "URLs in answers are https, too"
    with (
        httpx.Client(base_url=server.url) as stranger,
        pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        stranger.get("/api/v1/healthz")


def test_plain_http_and_old_tls_versions_are_refused(server: LiveServer, files: Files) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http") + "/api/v1/healthz")
    old = ssl.create_default_context(cafile=str(files.authority))
    with pytest.warns(DeprecationWarning):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with httpx.Client(base_url=server.url, verify=old) as client, pytest.raises(httpx.ConnectError):
        client.get("/api/v1/healthz")


def test_our_client_reports_an_untrusted_certificate_at_once(server: LiveServer) -> None:
    with (
        trainhouse.ServiceClient(server.url, "tml-me", retry_seconds=3600) as service,
        pytest.raises(trainhouse.APIConnectionError, match=r"is not trusted \(.*SSL_CERT_FILE"),
    ):
        service.get_server_capabilities()


def test_our_client_and_the_sdk_trust_ssl_cert_file(
    server: LiveServer, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(files.authority))
    with trainhouse.ServiceClient(server.url, "tml-me") as service:
        assert service.get_server_capabilities()
    # In a separate interpreter, because the SDK keeps connections open until the process ends.
    by_sdk = subprocess.run(
        [sys.executable, "-c", SDK_SCRIPT, server.url], capture_output=True, text=True, timeout=60, check=False
    )
    assert by_sdk.stdout.strip() == MODEL, by_sdk.stderr


def test_an_unusable_certificate_stops_the_start(files: Files, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    other, encrypted = made(tmp_path / "other"), made(tmp_path / "encrypted", "-passout", "pass:secret")
    missing = tmp_path / "none.pem"
    for certificate, key in (
        (other.certificate, files.key),
        (encrypted.certificate, encrypted.key),
        (missing, files.key),
        (files.key, files.key),
    ):
        config = server_config(tiny_models["qwen3"], tmp_path / "state", tls_certificate=certificate, tls_key=key)
        with pytest.raises(StartError, match=f"certificate {certificate} with key .* without a passphrase"):
            check_certificate(config)
    with pytest.raises(ConfigError, match="tls_certificate and tls_key go together"):
        server_config(tiny_models["qwen3"], tmp_path / "state", tls_certificate=files.certificate)
