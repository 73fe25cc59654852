"""A program that tries a checkpoint's tokenizer and chat templates, for `tokenizer` to run.

    python -P tokenizer_trial.py BYTES tokenizer.json|- [TEMPLATES ...]

Limits its own memory. Prints the path of each file before it tries it; if a file cannot be used, it
prints the reason and ends with status 3. A template may refuse the one message that it gets.
"""

import json
import re
import sys
from contextlib import suppress

TEXT = "A text: 12 words, x = f(y)\n\ttabs, é and 漢字."
UNUSABLE = 3
_GENERATION_TAGS = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
"""Tags of transformers' extension of Jinja; they mark a part of the text."""


def main() -> None:
    """Try the files on the command line."""
    limit_memory(int(sys.argv[1]))
    if sys.argv[2] != "-":
        begin(sys.argv[2])
        try_tokenizer(sys.argv[2])
    for path in sys.argv[3:]:
        begin(path)
        try_templates(path)


def begin(path: str) -> None:
    """Print what is tried now: it is the last line if the process is killed."""
    print(path, flush=True)


def end(reason: str) -> None:
    """Exit, because a file cannot be used; the reason becomes one line."""
    print(" ".join(reason.split()))
    sys.exit(UNUSABLE)


def limit_memory(num_bytes: int) -> None:
    """Allow no more address space, where the system can say so."""
    with suppress(ImportError, ValueError, OSError):  # Windows; a limit that is lower still
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def try_tokenizer(path: str) -> None:
    """Read a `tokenizer.json` and encode texts with it."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
        for text in ("", "a", TEXT):
            tokenizer.decode(tokenizer.encode(text).ids)
    except BaseException as error:  # also a panic
        end(f"{type(error).__name__} {str(error)[:2000]}")


def try_templates(path: str) -> None:
    """Render the chat templates of a `.jinja` file or a `tokenizer_config.json` for one message."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    found = json.loads(text).get("chat_template") if path.endswith(".json") else text
    named = found if isinstance(found, list) else [{"template": found}]
    for template in [str(each.get("template")) for each in named if isinstance(each, dict)]:
        # As transformers makes it.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals |= {"raise_exception": _refuse, "strftime_now": str}
        try:
            environment.from_string(_GENERATION_TAGS.sub("", template)).render(
                messages=[{"role": "user", "content": "a"}], add_generation_prompt=True
            )
        except MemoryError:
            end("MemoryError")
        except Exception:  # it may refuse this conversation, or be none
            continue


def _refuse(message: str) -> None:
    raise ValueError(message)


if __name__ == "__main__":
    main()
