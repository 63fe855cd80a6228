"""What a request is refused with: a status, a code that programs read and one sentence."""

from __future__ import annotations

from typing import Any

TYPES = {  # as OpenAI's API calls them
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
}


class Refusal(Exception):
    """A request that is not answered as asked.

    Attributes:
        status: Of HTTP.
        code: Short and stable, also the reason in the metrics.
        message: One sentence for the client, which names no file and no line.
        retry_after: Seconds after which to try again, if that helps.
    """

    def __init__(
        self, status: int, code: str, message: str, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after

    def body(self, request_id: str) -> dict[str, Any]:
        """Makes the JSON that is answered."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "code": self.code,
                "request_id": request_id,
            }
        }

    def headers(self) -> dict[str, str]:
        """Makes the headers that belong to it."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def overloaded() -> Refusal:
    """Says that as many images are under way as may be."""
    return Refusal(
        429, "queue_full", "the server has all the images it can hold; try again later", 1
    )


def too_many_connections() -> Refusal:
    """Says that as many connections are open as may be."""
    return Refusal(
        503,
        "too_many_connections",
        "the server has all the connections it can hold; try again later, and close idle ones",
        1,
    )


def not_ready(retry_after: float = 5) -> Refusal:
    """Says that the model's process is not there, for now."""
    return Refusal(503, "not_ready", "the model is being made ready; try again later", retry_after)


def not_loaded(model: str) -> Refusal:
    """Says that somebody has unloaded a model."""
    return Refusal(
        503,
        "model_not_loaded",
        f"the model {model} is not loaded; POST /v2/repository/models/{model}/load loads it",
    )


def ending() -> Refusal:
    """Says that the server ends, once it has answered what it has."""
    return Refusal(503, "ending", "the server is about to end; try again later", 1)


def failed() -> Refusal:
    """Says that the inference of an image raised, which is in the log under the request's id."""
    return Refusal(
        500, "inference_failed", "the model failed on this image; the log has it by request_id"
    )


def undecoded() -> Refusal:
    """Says that the process that decoded an image has ended with it, or failed."""
    return Refusal(
        500,
        "decoding_failed",
        "the process that decodes has failed on this image, or ended with it; do not retry",
    )


def quarantined() -> Refusal:
    """Says that an image is not run again."""
    return Refusal(
        500,
        "quarantined",
        "the model's process has ended twice while it ran this image, which is not run again for"
        " a while; do not retry",
    )
