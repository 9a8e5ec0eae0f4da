"""A complete client of TinyLoop's front protocol. Usage: python minimal_client.py ENDPOINT PROMPT"""

import struct
import sys
import time
import uuid

import msgpack
import zmq

VERSION = b"TL2"
LEASE_S = 10  # silence after which either side gives the other up


def generate(endpoint, prompt, **fields):
    """Yields (text, token ids) as they arrive. `fields` are further fields of `Generate`."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 200  # ms: let the goodbye leave
    socket.connect(endpoint)
    id = uuid.uuid4().hex

    def send(**body):
        socket.send_multipart([VERSION, msgpack.packb(body)])

    send(type="Generate", id=id, prompt_text=prompt, **fields)
    received, pings = len(fields.get("done", b"")) // 4, 0
    heard = ping_at = time.monotonic()
    try:
        while (now := time.monotonic()) < heard + LEASE_S:
            if now >= ping_at:
                pings, ping_at = pings + 1, now + LEASE_S / 4
                send(type="Ping", n=pings, lease_ms=LEASE_S * 1000)
            if not socket.poll(100):
                continue
            version, *bodies = socket.recv_multipart()
            heard = time.monotonic()
            if version != VERSION:
                raise ConnectionError(f"the dispatcher speaks {version!r}, this client {VERSION!r}")
            for body in map(msgpack.unpackb, bodies):
                if body["type"] == "Failed" and body["id"] in (id, ""):
                    raise RuntimeError(f"{body['code']}: {body['message']}")
                if body["type"] in ("Tokens", "Done") and body["id"] == id:
                    packed = body.get("tokens", b"")
                    if body.get("seq", received) != received:
                        raise ConnectionError(f"token {received} was expected, {body['seq']} came")
                    received += len(packed) // 4
                    yield body.get("text", ""), struct.unpack(f"<{len(packed) // 4}I", packed)
                    if body["type"] == "Done":
                        return
        raise ConnectionError(f"nobody answers at {endpoint}")
    finally:
        send(type="Goodbye")
        socket.close()


if __name__ == "__main__":
    for text, _ in generate(sys.argv[1], sys.argv[2]):
        print(text, end="", flush=True)
