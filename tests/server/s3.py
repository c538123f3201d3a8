"""A local S3 server for tests, with faults that the test controls."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from wsgiref.types import StartResponse, WSGIEnvironment

import fsspec
import pytest
from fsspec.asyn import sync
from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

BUCKET = "bucket"


class S3:
    """An S3 endpoint that records its requests and can fail them.

    fails: given "METHOD PATH", True if the request must be answered with 500.
    requests: all requests so far, as "METHOD PATH".
    """

    def __init__(self) -> None:
        self.fails: Callable[[str], bool] = lambda request: False
        self.requests: list[str] = []
        self._moto = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environment: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        request = f"{environment['REQUEST_METHOD']} {environment['PATH_INFO']}"
        self.requests.append(request)
        if self.fails(request):
            environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return []
        return self._moto(environment, start_response)


class _Quiet(MotoRequestHandler):
    def log(self, *_: object) -> None:
        pass


@contextmanager
def s3_server() -> Iterator[S3]:
    """Runs an S3 server with one empty bucket, and points this process and its children to it."""
    s3 = S3()
    server = make_server("127.0.0.1", 0, s3, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")  # retries are up to our own code
        thread.start()
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        fsspec.filesystem("s3").makedirs(BUCKET, exist_ok=True)
        yield s3
        _close_connections()
        server.shutdown()
        thread.join()
        server.server_close()


def _close_connections() -> None:
    """Closes what s3fs has open, for which it takes only a tenth of a second when its objects are collected."""
    kind = fsspec.get_filesystem_class("s3")
    for files in list(kind._cache.values()):
        if files._s3 is not None:
            sync(files.loop, files._s3.__aexit__, None, None, None)
    kind.clear_instance_cache()


def names_at(url: str) -> list[str]:
    """Returns the sorted names of the files below a URL."""
    files, path = fsspec.core.url_to_fs(url)
    files.invalidate_cache()
    return sorted(file.removeprefix(f"{path}/") for file in files.find(path))
