"""gRPC without protocol buffers: the name is metadata, and the message is the bytes of the array."""

from concurrent import futures

import grpc
import numpy as np

from wires.security import Security
from wires.store import Array, Store

_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_THREADS = 4


def serve(port: int, security: Security) -> None:
    """Serve for ever."""
    store = Store()

    def push_pull(request: bytes, context: grpc.ServicerContext) -> bytes:
        said = dict(context.invocation_metadata())
        assert said["token"] == security.token
        return store.push_pull(said["name"], np.frombuffer(request, np.float32)).tobytes()

    handler = grpc.method_handlers_generic_handler("ps", {"push_pull": grpc.unary_unary_rpc_method_handler(push_pull)})
    server = grpc.server(futures.ThreadPoolExecutor(_THREADS), options=_OPTIONS)
    server.add_generic_rpc_handlers((handler,))
    if security.is_encrypted:
        pair = security.key.read_bytes(), security.cert.read_bytes()
        server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([pair]))
    else:
        server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


class Client:
    """One connection."""

    def __init__(self, port: int, security: Security) -> None:
        address, self._token = f"127.0.0.1:{port}", security.token
        if security.is_encrypted:
            roots = grpc.ssl_channel_credentials(security.cert.read_bytes())
            channel = grpc.secure_channel(address, roots, _OPTIONS)
        else:
            channel = grpc.insecure_channel(address, _OPTIONS)
        self._call = channel.unary_unary("/ps/push_pull")

    def push_pull(self, name: str, array: Array) -> Array:
        """Send an array, and return the sum."""
        said = [("name", name), ("token", self._token)]
        return np.frombuffer(self._call(array.tobytes(), metadata=said), np.float32)
