"""A folder over HTTP with range requests, on this machine."""

import contextlib
import http.server
import re
import threading


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        if self.server.failures > 0:
            self.server.failures -= 1
            self.close_connection = True
            self.connection.close()  # in the middle of it
            return
        path = self.server.home / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status, part = 200, data
        if found:
            start, end = int(found[1]), int(found[2] or len(data) - 1)
            status, part = 206, data[start : end + 1]
            self.server.ranges += 1
        self.send_response(status)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        if found:
            self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(data)}")
        self.end_headers()
        if body:
            self.wfile.write(part)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(home, address="127.0.0.1"):
    """The server: the next `failures` requests are cut off; `ranges` were answered."""
    httpd = http.server.ThreadingHTTPServer((address, 0), _Handler)
    httpd.failures, httpd.ranges, httpd.home = 0, 0, home
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield httpd
    finally:
        httpd.shutdown()
        httpd.server_close()
