"""What a client knows of the service: of which moment its parameters are, and what became of its pushes."""

from collections.abc import Mapping

from tfps.client.message import Message

Seen = Mapping[str, str]
"""The generation and the step of parameters that were read."""


class Progress:
    """The last answers of a service.

    Attributes:
        seen: Of which moment the parameters are that were read last.
        dropped: How many pushes have come too late.
    """

    def __init__(self) -> None:
        self.seen: Seen = {"generation": "", "step": "0"}
        self.dropped = 0
        self._newest = "", 0
        self._last_dropped: Seen | None = None

    def read(self, answer: Message) -> None:
        """Note that parameters were read."""
        self.seen = {name: answer.metadata[name] for name in ("generation", "step")}
        self._note(answer)

    def pushed(self, answer: Message, computed: Seen) -> None:
        """Note what has become of a push.

        Args:
            answer: The answer to it.
            computed: Of which moment the parameters are that its gradients were computed with.
        """
        self._note(answer)
        if int(answer.metadata["applied"]):
            self._last_dropped = None
            return
        self.dropped += 1
        if computed == self._last_dropped:
            both = f"both are of step {computed['step']}"
            _warn(f"a push was dropped, as the one before: {both}. Pull before each push.")
        self._last_dropped = computed

    def _note(self, answer: Message) -> None:
        """Say so if updates are lost that an earlier answer had."""
        version = answer.metadata["generation"], int(answer.metadata["step"])
        (generation, step), self._newest = self._newest, version
        if generation not in ("", version[0]) and version[1] < step:
            lost = f"of {step} updates, at least {step - version[1]} are lost"
            _warn(f"the service has begun again from a checkpoint: {lost}.")


def _warn(text: str) -> None:
    import logging  # noqa: PLC0415  slow to import, and seldom needed

    logging.getLogger(__name__).warning(text)
