"""Text for the embedded models: the Python standard library and generated tasks of low entropy.

Nothing is downloaded. The standard library is read from the running interpreter (PSF licence) and its version and
sha256 are recorded; whole files are held out. The tasks are drawn from a seeded generator: rewriting a passage under
a per-prompt word substitution, templated code, structured records. Invented words are split by a hash: those of
held-out prompts are never seen in training.
"""

import hashlib
import random
import sys
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

KINDS = ("substitution", "code", "records", "text")
HELD_OUT_FILES = 16  # one file in 16
HELD_OUT_WORDS = 8  # one invented word in 8

NOUNS = (
    "river stone garden window letter bridge market forest teacher engine harbor candle mirror valley farmer "
    "doctor painter soldier winter summer morning evening mountain island village castle kitchen basket blanket "
    "bottle button camera carpet circle corner cousin desert dinner dragon feather finger flower hammer helmet "
    "jacket ladder lesson lemon meadow needle orange pencil pepper pillow planet pocket puzzle rabbit ribbon "
    "saddle sailor school shadow silver spider spring street sugar table temple ticket tiger tower tunnel turtle "
    "uncle voice wagon water wheel widow wolf paper road ship tree bird house king queen child field lamp clock"
).split()
VERBS = (
    "watches carries follows paints builds opens closes finds loses sells buys cleans breaks repairs moves lifts "
    "hides counts draws holds leaves reaches crosses visits keeps wants takes brings turns pulls pushes covers"
).split()
ADJECTIVES = (
    "old young quiet bright dark cold warm small large green yellow silent broken hidden distant narrow heavy "
    "simple gentle strange early late empty round sharp soft tall brave tired golden"
).split()
PREPOSITIONS = "near behind under above beside with without before after inside".split()
FIELD_HEADS = "max min last first total next user file page item row cache token start end base line node".split()
FIELD_TAILS = (
    "size count name index value time key path limit offset width height code state score label level "
    "port mode weight"
).split()
TYPES = "int str float bool bytes".split()
LEVELS = ("INFO", "WARN", "DEBUG", "ERROR")
COLORS = "red blue green black white amber violet grey".split()
CITIES = "Oslo Lima Cairo Delhi Paris Quito Seoul Tunis Turin Porto".split()


@dataclass(frozen=True)
class Sample:
    """One task: the text given and the text wanted (without the end token)."""

    kind: str
    prompt: str
    response: str
    source: str


def invented_word(rng, held_out):
    """A pronounceable word of two or three syllables from the training or the held-out share."""
    while True:
        word = "".join(
            rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") + rng.choice(("", "", "n", "r", "l"))
            for _ in range(rng.choice((2, 2, 3)))
        )
        if (zlib.crc32(word.encode()) % HELD_OUT_WORDS == 0) == held_out:
            return word


def _sentence(rng, nouns):
    def thing():
        noun = rng.choice(nouns)
        return f"the {rng.choice(ADJECTIVES)} {noun}" if rng.random() < 0.5 else f"the {noun}"

    text = f" {thing()} {rng.choice(VERBS)} {thing()}"
    if rng.random() < 0.6:
        text += f" {rng.choice(PREPOSITIONS)} {thing()}"
    return text + " ."


def substitution(rng, held_out, source):
    """Rewrite a passage with some words replaced. Some words offer two replacements, either of which is right:
    the target's choice there cannot be foreseen, and whatever is chosen the text after it goes on the same way,
    so that a rejected branch meets the accepted text again."""
    nouns = rng.sample(NOUNS, rng.randint(4, 8))
    mapped = rng.sample(nouns, rng.randint(2, min(5, len(nouns))))
    table = {noun: [invented_word(rng, held_out)] for noun in mapped}
    if rng.random() < 0.4:
        table[mapped[0]].append(invented_word(rng, held_out))
    passage = "".join(_sentence(rng, nouns) for _ in range(rng.randint(2, 5)))
    words = [rng.choice(table[w]) if w in table else w for w in passage.split(" ")]
    rules = "".join(f" {noun} = {' / '.join(options)} ;" for noun, options in table.items())
    return Sample("substitution", f"words{rules}\ntext{passage}\nnew text", " ".join(words) + "\n", source)


def _fields(rng, held_out, n):
    names = []
    while len(names) < n:
        if rng.random() < 0.5:
            name = f"{rng.choice(FIELD_HEADS)}_{rng.choice(FIELD_TAILS)}"
        else:
            name = f"{invented_word(rng, held_out)}_{rng.choice(FIELD_TAILS)}"
        if name not in names:
            names.append(name)
    return names


def code(rng, held_out, source):
    """Code whose every line follows from the list of names in the prompt."""
    names = _fields(rng, held_out, rng.randint(3, 6))
    types = [rng.choice(TYPES) for _ in names]
    cls = invented_word(rng, held_out).capitalize() + invented_word(rng, held_out).capitalize()
    listed = ", ".join(f"{n}: {t}" for n, t in zip(names, types, strict=True))
    shape = rng.randrange(5)
    if shape == 0:
        head = f"# class {cls} with {listed}\nclass {cls}:\n"
        body = f"    def __init__(self, {', '.join(names)}):\n"
        body += "".join(f"        self.{n} = {n}\n" for n in names)
        body += "\n    def as_dict(self):\n        return {\n"
        body += "".join(f'            "{n}": self.{n},\n' for n in names) + "        }\n"
    elif shape == 1:
        head = f"# getters of {cls} for {listed}\nclass {cls}:\n"
        body = "".join(f"    def get_{n}(self) -> {t}:\n        return self.{n}\n\n" for n, t in zip(names, types))
    elif shape == 2:
        head = f"# options of {cls} : {listed}\ndef parse_{names[0]}(parser):\n"
        body = "".join(
            f'    parser.add_argument("--{n}", type={t}, required=True)\n' for n, t in zip(names, types)
        )
        body += "    return parser.parse_args()\n"
    elif shape == 3:
        head = f"# checks of {cls} : {listed}\ndef check(obj):\n"
        body = "".join(
            f'    if not isinstance(obj.{n}, {t}):\n        raise TypeError("{n} must be {t}")\n'
            for n, t in zip(names, types)
        )
    else:
        head = f"# dataclass {cls} with {listed}\n@dataclass\nclass {cls}:\n"
        body = "".join(f"    {n}: {t}\n" for n, t in zip(names, types))
        body += f"\n    def copy(self):\n        return {cls}(\n"
        body += "".join(f"            {n}=self.{n},\n" for n in names) + "        )\n"
    return Sample("code", head, body, source)


def records(rng, held_out, source):
    """Rows of JSON, CSV, a log or SQL: counters, cycles, constants and now and then a value that is a free choice."""
    keys = _fields(rng, held_out, rng.randint(2, 4))
    start, step = rng.randint(1, 999), rng.choice((1, 1, 1, 2, 10))
    cycle = rng.sample(COLORS, rng.randint(2, 3))
    name = invented_word(rng, held_out)
    constant = invented_word(rng, held_out)
    free = rng.random() < 0.25
    city = rng.choice(CITIES)
    minute, second = rng.randint(0, 50), rng.randint(10, 40)
    shape = rng.randrange(4)

    def row(i):
        number, color = start + i * step, cycle[i % len(cycle)]
        place = rng.choice(CITIES) if free else city
        if shape == 0:
            values = [str(number), f'"{color}"', f'"{constant}"', f'"{place}"']
            return "{" + ", ".join(f'"{k}": {v}' for k, v in zip(keys, values)) + "}\n"
        if shape == 1:
            return f"{number},{name},{color},{place},{constant}\n"
        if shape == 2:
            level = rng.choice(LEVELS) if free else LEVELS[len(cycle) % 4]
            return f"10:{minute:02d}:{second + i:02d} {level} {name} job {number} {keys[0]}={color} done\n"
        return f"INSERT INTO {name} ({', '.join(keys[:2])}) VALUES ({number}, '{color}');\n"

    shown, wanted = rng.randint(3, 4), rng.randint(4, 7)
    rows = [row(i) for i in range(shown + wanted)]
    return Sample("records", "".join(rows[:shown]), "".join(rows[shown:]), source)


TASKS = {"substitution": substitution, "code": code, "records": records}


def task(kind, seed, held_out=False):
    """The task of one kind and one seed (a string): always the same text."""
    source = f"{kind}/{'held_out' if held_out else 'train'}/{seed}"
    return TASKS[kind](random.Random(source), held_out, source)


def standard_library():
    """(relative path, text) of the standard library's sources without its tests, sorted, and what was read:
    {python, files, bytes, sha256}."""
    root = Path(sysconfig.get_path("stdlib"))
    files, digest, total = [], hashlib.sha256(), 0
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if any(part in ("test", "tests", "site-packages", "dist-packages", "idlelib") for part in relative.split("/")):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        files.append((relative, text))
        digest.update(relative.encode() + b"\0" + text.encode())
        total += len(text)
    facts = {"python": sys.version.split()[0], "files": len(files), "bytes": total, "sha256": digest.hexdigest()}
    return files, facts


def file_is_held_out(relative):
    return zlib.crc32(relative.encode()) % HELD_OUT_FILES == 0


def text_prompts(files, n, seed, held_out, lines=(4, 9)):
    """Prompts from the standard library: a few lines from the start of a function or class, in n places."""
    rng = random.Random(f"text/{'held_out' if held_out else 'train'}/{seed}")
    pool = []
    for relative, text in files:
        if file_is_held_out(relative) != held_out:
            continue
        rows = text.split("\n")
        pool += [(relative, i) for i, row in enumerate(rows) if row.lstrip().startswith(("def ", "class "))]
    texts = dict(files)
    chosen = rng.sample(pool, min(n, len(pool)))
    prompts = []
    for relative, i in chosen:
        rows = texts[relative].split("\n")[i : i + rng.randint(*lines)]
        indent = len(rows[0]) - len(rows[0].lstrip())
        rows = [row[indent:] if row[:indent].isspace() or indent == 0 else row for row in rows]
        prompts.append(Sample("text", "\n".join(rows)[:400] + "\n", "", f"{relative}:{i + 1}"))
    return prompts
