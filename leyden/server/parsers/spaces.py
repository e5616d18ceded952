"""White space at the end of a text, which only counts if more text follows."""


class TrailingSpace:
    """Passes text on and keeps back the white space at its end until something follows it."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self.passed = False  # whether anything but white space has come

    def push(self, text: str) -> str:
        body = text.rstrip()
        if not body:
            self._held.append(text)
            return ""
        passed = "".join(self._held) + body
        self._held = [text[len(body) :]]
        self.passed = True
        return passed

    def flush(self) -> str:
        """The white space that was kept back, if it stands at the end of some text."""
        held, self._held = self._held, []
        return "".join(held) if self.passed else ""
