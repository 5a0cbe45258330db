"""Taking a model's reply apart, the same way in every environment."""

from __future__ import annotations


def split_think(text: str) -> tuple[str | None, str]:
    """Split a reply at its last `</think>` into reasoning and answer; total over all strings.

    A missing opening tag is tolerated, since chat templates may have written it into the prompt.

    Returns:
        The text of the closed think block, None when there is none; and the text the answer is
        looked for in: all of it without tags, nothing when a think block never closes.
    """
    before, closed, after = text.rpartition("</think>")
    if closed:
        opening, found, inside = before.partition("<think>")
        return (inside if found else opening).replace("</think>", "").replace("<think>", ""), after
    answer = text.partition("<think>")[0]
    # an open think block: all that follows is reasoning, and nothing came after
    return None, answer if len(answer) == len(text) else ""
