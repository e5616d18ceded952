"""python -m leyden.synthetic: write examples as JSON lines, or show some and count what there is."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from leyden.errors import ConfigError
from leyden.synthetic import SPLITS, Example, generate


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m leyden.synthetic", description="Synthetic agent work.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, default=1000, help="number of examples (default 1000)")
    parser.add_argument("--start", type=int, default=0, help="index of the first one (default 0)")
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--families", help="only these, separated by commas")
    parser.add_argument("--out", type=Path, help="JSON lines file to write")
    parser.add_argument("--show", type=int, metavar="K", default=0, help="print K examples and statistics of all")
    args = parser.parse_args(argv)
    families = args.families.split(",") if args.families else None
    try:
        examples: Iterable[Example] = generate(args.seed, args.n, args.split, families, args.start)
        if args.out:
            examples = _written(examples, args.out)
        statistics = _statistics(_shown(examples, args.show))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if args.show:
        print(statistics)
    return 0


def _written(examples: Iterable[Example], path: Path) -> Iterator[Example]:
    with path.open("w", encoding="utf-8") as file:
        for example in examples:
            file.write(json.dumps(example, ensure_ascii=False) + "\n")
            yield example


def _shown(examples: Iterable[Example], count: int) -> Iterator[Example]:
    for i, example in enumerate(examples):
        if i < count:
            print(pretty(example))
        yield example


def pretty(example: Example) -> str:
    """An example for the eye: a line per tool, the turns, the check."""
    lines = [f"=== {example['family']}, thinking {'on' if example['thinking'] else 'off'}, {example['template']}"]
    for tool in example["tools"] or []:
        function = tool["function"]
        params = ", ".join(f"{name}: {schema['type']}" for name, schema in function["parameters"]["properties"].items())
        lines.append(f"tool       {function['name']}({params}): {function['description']}")
    for message in example["messages"]:
        if message.get("reasoning_content"):
            lines.append(_block("thinks", message["reasoning_content"]))
        if message["content"]:
            lines.append(_block(message["role"], message["content"]))
        for call in message.get("tool_calls", []):
            lines.append(_block("calls", f"{call['function']['name']} {call['function']['arguments']}"))
    check = example["check"]
    return "\n".join(
        [*lines, _block("check", f"{check['kind']} {json.dumps(check['expected'], ensure_ascii=False)}"), ""]
    )


def _block(name: str, text: str) -> str:
    return f"{name:11}" + text.replace("\n", "\n" + " " * 11)


def _statistics(examples: Iterable[Example]) -> str:
    """Examples, thinking, checks and mean size in characters by family; consumes `examples`."""
    count: Counter[str] = Counter()
    thinking: Counter[str] = Counter()
    size: Counter[str] = Counter()
    checks: Counter[str] = Counter()
    templates: set[str] = set()
    for example in examples:
        family = example["family"]
        count[family] += 1
        thinking[family] += example["thinking"]
        size[family] += len(json.dumps([example["messages"], example["tools"]], ensure_ascii=False))
        checks[example["check"]["kind"]] += 1
        templates.update(example["template"].split("+"))
    rows = [f"{'family':15}{'examples':>9}{'thinking':>10}{'characters':>12}"]
    for family, n in count.most_common():
        rows.append(f"{family:15}{n:9}{thinking[family] / n:10.0%}{size[family] / n:12.0f}")
    total = sum(count.values())
    rows.append(
        f"{'all':15}{total:9}{sum(thinking.values()) / total:10.0%}{sum(size.values()) / total:12.0f}"
        if total
        else "none"
    )
    kinds = ", ".join(f"{kind} {n}" for kind, n in checks.most_common())
    return "\n".join([*rows, f"checks: {kinds}", f"phrases used: {len(templates)}"])


if __name__ == "__main__":
    sys.exit(main())
