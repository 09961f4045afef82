"""A small server for one person's browser: threads, no log, and an end when it is told to."""

from __future__ import annotations

import socket
from socketserver import TCPServer, ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication

from evo.errors import UsageError

__all__ = ["LiveServer", "open_server"]


class _Handler(WSGIRequestHandler):
    timeout = 30  # seconds; a browser that opens a connection and says nothing keeps a thread no longer

    def log_message(self, format: str, *args: object) -> None:
        return None


class LiveServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # not HTTPServer's, which asks the network for a name
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        return None  # a browser that went away

    @property
    def url(self) -> str:
        host = self.server_name
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"


class _Server6(LiveServer):
    address_family = socket.AF_INET6


def open_server(host: str, port: int, app: WSGIApplication) -> LiveServer:
    """Listening, but not serving yet. Raises UsageError where that cannot be had."""
    if not 0 <= port < 2**16:
        raise UsageError(f"--port {port} is not one from 0 to 65535")
    try:
        server = (_Server6 if ":" in host else LiveServer)((host, port), _Handler)
    except OSError as error:
        raise UsageError(
            f"cannot serve at {host}, port {port}: {error.strerror or error}; choose another with --port or --host"
        ) from error
    server.set_app(app)
    return server
