"""Downloads of checkpoints from servers that answer in part."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from trainhouse.client.connection import ServerConnection
from trainhouse.client.rest import RestClient


@contextmanager
def storage(answers_head: bool) -> Iterator[str]:
    """Yields the address of a server with two files of a checkpoint, which may drop connections that ask for sizes."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            is_listing = self.path.endswith("external_weights_urls")
            listing = {"urls": {"a": "/a", "b": "/b"}, "expires": "2030-01-01T00:00:00Z"}
            content = json.dumps(listing).encode() if is_listing else b"abc"
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def do_GET(self) -> None:
            self.answer()

        def do_HEAD(self) -> None:
            if answers_head:
                self.answer()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.parametrize("answers_head", [True, False])
def test_files_whose_sizes_cannot_be_asked_are_downloaded_without_progress(answers_head: bool, tmp_path: Path) -> None:
    shown: list[tuple[int, int]] = []
    with storage(answers_head) as url:
        connection = ServerConnection(url, "tml-key", 5.0)
        download = RestClient(connection).download_checkpoint
        files = download("tinker://run/weights/a", tmp_path, lambda *each: shown.append(each)).result(20)
        connection.close()
    assert [file.read_bytes() for file in files] == [b"abc", b"abc"]
    assert shown == ([(3, 6), (6, 6)] if answers_head else [])
