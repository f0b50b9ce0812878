"""The one error a request can end with. Raised anywhere between the HTTP server and the tokenizer manager."""

from __future__ import annotations

from typing import Any

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    499: "ClientClosedRequest",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
_MAX_MESSAGE = 1000
# Of a 503, where no better number is known.
RETRY_AFTER_S = 5


class RequestError(Exception):
    """message: one sentence for the client, cut if it quotes too much of what came. param: the field of the request
    that is wrong. retry_after_s: of a 503, when it is worth while to ask again."""

    def __init__(
        self, message: str, status_code: int = 400, param: str | None = None, retry_after_s: int = RETRY_AFTER_S
    ) -> None:
        if len(message) > _MAX_MESSAGE:
            message = message[:_MAX_MESSAGE] + "…"
        super().__init__(message)
        self.message = message
        self.status_code = status_code
        self.param = param
        self.retry_after_s = retry_after_s

    def headers(self) -> dict[str, str]:
        """Of a reply that is this error."""
        return {"retry-after": str(self.retry_after_s)} if self.status_code == 503 else {}

    def body(self) -> dict[str, Any]:
        """OpenAI's error shape, as SGLang flattens it."""
        return {
            "object": "error",
            "message": self.message,
            "type": _TYPES.get(self.status_code, "InternalServerError" if self.status_code >= 500 else "Error"),
            "param": self.param,
            "code": self.status_code,
        }
