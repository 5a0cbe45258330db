"""A chat endpoint on this machine that speaks the real protocol and can be told to misbehave."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "sk-test-0123456789abcdefXYZ"


class ChatServer:
    """Answers each request by the next reply of a script; the last one repeats.

    A reply is a function of the handler; `requests` holds what arrived: (path, headers, body).
    """

    def __init__(self, *replies: Callable[["Handler"], None]):
        self.replies = list(replies)
        self.requests: list[tuple[str, dict, dict]] = []
        self.lock = threading.Lock()
        self.stop = threading.Event()

    def next_reply(self) -> Callable[["Handler"], None]:
        with self.lock:
            return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: ChatServer

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.script.requests.append((self.path, dict(self.headers), body))
        self.script.next_reply()(self)

    def log_message(self, *args):
        pass

    def answer(self, status, data: bytes, kind="application/json", **headers):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client may have had enough
            self.wfile.write(data)

    def begin_stream(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, data: str):
        payload = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(payload):x}\r\n".encode() + payload + b"\r\n")
        self.wfile.flush()

    def end_stream(self):
        self.wfile.write(b"0\r\n\r\n")

    def drop(self):
        self.close_connection = True


@contextlib.contextmanager
def serving(*replies) -> Iterator[ChatServer]:
    script = ChatServer(*replies)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Scripted", (Handler,), {"script": script}))
    server.daemon_threads = True
    script.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield script
    finally:
        script.stop.set()
        server.shutdown()
        server.server_close()


def streamed(text, *, usage=(30, 7), finish="stop"):
    """Return a reply that streams `text` in pieces, as OpenAI and vLLM do."""

    def reply(handler: Handler):
        handler.begin_stream()
        handler.event(json.dumps({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
        for piece in [text[i : i + 9] for i in range(0, len(text), 9)]:
            handler.event(json.dumps({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]}))
        handler.event(json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}))
        if usage:
            counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
            handler.event(json.dumps({"choices": [], "usage": counts}))
        handler.event("[DONE]")
        handler.end_stream()

    return reply


def cut(text):
    """Return a reply that breaks the connection in the middle of a stream."""

    def reply(handler: Handler):
        handler.begin_stream()
        handler.event(json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}))
        handler.drop()

    return reply


def whole(text, *, usage=(30, 7), finish="stop"):
    """Return a reply in one JSON body, as an endpoint that cannot stream sends it."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    counts = {"usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}} if usage else {}
    body = {"choices": [choice], **counts}
    return lambda handler: handler.answer(200, json.dumps(body).encode())


def status(code, message="", **headers):
    """Return a reply with an HTTP error, its body as OpenAI writes it."""
    body = json.dumps({"error": {"message": message, "type": "error", "code": message}}).encode()
    return lambda handler: handler.answer(code, body, **headers)


def raw(data: bytes, kind="application/json"):
    """Return a reply with status 200 and any bytes."""
    return lambda handler: handler.answer(200, data, kind)


def silent(handler: Handler):
    """Say nothing until the client has gone."""
    handler.script.stop.wait(5)
    handler.drop()
