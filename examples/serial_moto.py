"""moto's server handles one request at a time: ``python serial_moto.py -H HOST -p PORT``.

moto handles requests side by side and checks a put's condition before the put. Two puts at once of an absent object
then both succeed, or one ends with status 500, because the other has replaced the object that its answer describes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from moto import server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication


class SerialApplication(DomainDispatcherApplication):
    """moto's application, which one thread at a time is in."""

    def __init__(self, create_app: Callable[..., Any]) -> None:
        super().__init__(create_app)
        self._one = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        with self._one:
            return super().__call__(environ, start_response)


if __name__ == "__main__":
    vars(server)["DomainDispatcherApplication"] = SerialApplication
    server.main()
