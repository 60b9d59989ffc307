"""Show a question's prompts as the models see them: python scripts/show_prompt.py dataset=nq reader=llama3_8b question=3.

Takes the overrides of scripts/run.py, and of its own: question=N (position in the test split, from 1) or id=ID, and ids=true to
print the token ids as well.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from xcompress.config import checked_main, compose, quiet_libraries, to_settings
from xcompress.schema import UsageError

OWN = ("question", "id", "ids")


def main() -> None:
    """Print the prompts of one question."""
    quiet_libraries()
    from xcompress.show_prompt import render

    position = own.get("question", "1")
    if not position.isdecimal():
        raise UsageError(f"question={position}: give a position from 1, or id=ID")
    if own.get("ids", "false") not in ("true", "false"):
        raise UsageError(f"ids={own['ids']}: true or false")
    if {"question", "id"} <= set(own):
        raise UsageError("give question= or id=, not both")
    for line in render(to_settings(compose(sys.argv[1:])), int(position), own.get("id"), own.get("ids") == "true"):
        print(line)


if __name__ == "__main__":
    own = {a.partition("=")[0]: a.partition("=")[2] for a in sys.argv[1:] if a.partition("=")[0] in OWN and "=" in a}
    sys.argv[1:] = [a for a in sys.argv[1:] if a.partition("=")[0] not in OWN or "=" not in a]
    checked_main(main)
