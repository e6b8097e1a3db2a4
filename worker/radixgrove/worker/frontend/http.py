"""uvicorn's HTTP protocol with a bound on headers and OpenAI's shape for malformed requests."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from radixgrove.protocol.errors import ApiError, invalid

MAX_HEADER_BYTES = 64 << 10  # request line and headers; uvicorn itself has no bound


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    _header_bytes: int | None = None  # since the request began; None outside of headers

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Counted after parsing: what is still in the headers now has been nothing else.
        if self._header_bytes is not None:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._header_bytes = None
                self._refuse(
                    ApiError(
                        431,
                        f"The request's headers are larger than {MAX_HEADER_BYTES} bytes.",
                        code="headers_too_large",
                    )
                )

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._header_bytes = None
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._header_bytes = None
        self._refuse(invalid("The request is not valid HTTP."))

    def _refuse(self, error: ApiError) -> None:
        body = error.body()
        self.transport.write(
            b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (error.status, len(body), body)
        )
        self.transport.close()
