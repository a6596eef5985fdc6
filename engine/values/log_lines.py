"""Lines of the log of the server and its engines, which share one standard error."""

import logging

_CONTROLS = {
    code: ascii(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
}
_CONTROLS_BUT_LINES = {code: text for code, text in _CONTROLS.items() if chr(code) not in "\n\t"}


class LogFormatter(logging.Formatter):
    """One line for each message, and its traceback.

    A message may quote what a client has sent, which can neither begin a line nor command the
    terminal: control characters are escaped as in Python's source.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The line. `record.message` stays as it is, for other handlers."""
        message = record.message
        record.message = message.translate(_CONTROLS)
        try:
            return super().formatMessage(record)
        finally:
            record.message = message

    def formatException(self, ei: "logging._SysExcInfoType") -> str:  # noqa: N802 - logging's name
        """The lines of a traceback."""
        return super().formatException(ei).translate(_CONTROLS_BUT_LINES)
