"""The proxy's log, as a list of lines with their events."""

from forebay.proxy.log_events import LogEvent


class Said(list[str]):
    """The messages. `events` has each one's event, backend and reason. Call it to add a message."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[LogEvent, str, str]] = []

    def __call__(
        self, event: LogEvent, message: str, backend: str = "", reason: str = "", /
    ) -> None:
        self.append(message)
        self.events.append((event, backend, reason))
