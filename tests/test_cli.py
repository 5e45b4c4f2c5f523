"""The command line: what it prints, what it refuses, and how it ends."""

import functools
import importlib.machinery
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import types

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_tiny_models

from carryover_kernels.cli import demo as demo_module
from carryover_kernels.cli.main import main
from carryover_kernels.cli.show import Printer, new_console
from carryover_kernels.decoding import Request
from carryover_kernels.decoding import session as session_module

pytestmark = pytest.mark.usefixtures("backend")

ROOT = pathlib.Path(__file__).resolve().parent.parent
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_tiny_models(tmp_path_factory.mktemp("models"))


def run(capsys, *arguments):
    """(exit code, standard output, standard error)"""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def generate_arguments(models, *more):
    pair = ("--target", models / "target", "--drafter", models / "dflash")
    return ("generate", *pair, "--prompt", "the quick", "--max-new-tokens", 12, *more)


# demo


def test_demo_proves_equality_and_tells_what_it_cost(models, capsys):
    code, out, _ = run(capsys, "demo", "--models", models, "--prompts", 3, "--max-new-tokens", 16)
    assert code == 0
    assert "trained with carryover: carryover on" in out and "no embedded carryover drafter" not in out
    for words in ("code 0", "text 0", "code 1", "the code fox 0", "acceptance length", "tokens a pass", "tokens/s", "all 3"):
        assert words in out, words
    assert re.search(r"Proof: all 3 drafted answers \(\d+ tokens\) equal the target's own, token for token.", out)
    assert "Share of rounds that kept draft 1, 2, ...:" in out
    assert not ESCAPE.search(out), "colour codes in a pipe"


def test_demo_plots_the_shares_it_prints(models, tmp_path, capsys, monkeypatch):
    axes = pytest.importorskip("matplotlib.axes", reason="the extra `plots`").Axes
    drawn, bar = {}, axes.bar

    def watched(self, at, heights, width, label):
        drawn[label] = (list(at), list(heights))
        return bar(self, at, heights, width, label=label)

    monkeypatch.setattr(axes, "bar", watched)
    file = tmp_path / "shares.png"
    code, out, _ = run(capsys, "demo", "--models", models, "--prompts", 2, "--max-new-tokens", 16, "--plot", file)
    assert code == 0 and f"plot: {file}" in " ".join(out.split())
    assert file.read_bytes().startswith(b"\x89PNG\r\n") and file.stat().st_size > 2000
    printed = re.findall(r"^ +(\d+)  (\w+) +[#\u2588]* +(\d+)%$", out, re.M)
    assert printed and {name for _, name, _ in printed} == set(drawn)
    for name, (at, heights) in drawn.items():
        mine = [(int(position), int(share)) for position, other, share in printed if other == name]
        assert mine == [(i, round(height)) for i, height in enumerate(heights, 1)]
        assert [round(x) for x in at] == list(range(1, len(heights) + 1))


@pytest.mark.parametrize("name", ["shares.pdf", "no/folder/shares.png"])
def test_demo_refuses_a_plot_before_it_decodes(models, tmp_path, capsys, monkeypatch, name):
    monkeypatch.setattr(demo_module, "generate", None)
    code, _, err = run(capsys, "demo", "--models", models, "--plot", tmp_path / name)
    assert code == 2 and "must be a .png file in a folder that exists" in " ".join(err.split())
    monkeypatch.setattr(demo_module.importlib.util, "find_spec", lambda name: None)
    code, _, err = run(capsys, "demo", "--models", models, "--plot", tmp_path / "shares.png")
    assert code == 2 and "matplotlib is not installed" in " ".join(err.split())


def test_demo_says_when_no_drafter_carries(tmp_path, capsys):
    models = write_tiny_models(tmp_path, mark=False)
    code, out, _ = run(capsys, "demo", "--models", models, "--prompts", 1, "--max-new-tokens", 4)
    assert code == 0
    assert "There is no embedded carryover drafter yet" in out and "carryover off" in out


def test_demo_of_the_embedded_models(capsys):
    code, out, _ = run(capsys, "demo", "--prompts", 4, "--max-new-tokens", 32)
    assert code == 0
    assert "Proof: all" in out
    for kind in ("substitution", "code", "records", "text"):
        assert kind in out


def test_demo_ends_readable_on_ctrl_c(models, capsys, monkeypatch):
    told = []
    original = Printer.__call__

    def press(self, request, tokens, origins):
        original(self, request, tokens, origins)
        told.append(tokens)
        if len(told) == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(demo_module.Printer, "__call__", press)
    code, out, _ = run(capsys, "demo", "--models", models, "--prompts", 4, "--max-new-tokens", 16)
    assert code == 130
    assert "interrupted after" in out and "code 0" in out and "all 1" in out, "the table of finished runs should be there"


# generate


def test_generate_shows_text_and_proves_it(models, capsys):
    code, out, _ = run(capsys, *generate_arguments(models, "--dtype", "float32", "--prompt", "lazy dog"))
    assert code == 0
    assert out.count("equal to the target alone, all 12 tokens") == 2
    assert "zlab drafter of 4 drafts, carryover on" in out and "the quick" in out and "2 alone" in out


def test_generate_without_a_drafter(models, capsys):
    code, out, _ = run(capsys, "generate", "--target", models / "target", "--prompt", "the quick", "--max-new-tokens", 3)
    assert code == 0 and "drafted" not in out


def test_generate_samples_by_seed(models, capsys):
    texts = []
    for seed in (1, 1, 2):
        code, out, _ = run(capsys, *generate_arguments(models, "--temperature", 1.0, "--top-p", 0.9, "--seed", seed, "--method", "block"))
        assert code == 0 and "equal to" not in out
        texts.append(out[out.index("the quick") : out.index("┏")])
    assert texts[0] == texts[1] != texts[2]


def test_generate_reads_standard_input(models, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(read=lambda: "from a pipe"))
    code, out, _ = run(capsys, "generate", "--target", models / "target", "--prompt", "-", "--max-new-tokens", 2)
    assert code == 0 and "from a pipe" in out


def test_unequal_output_is_told_and_fails(models, capsys, monkeypatch):
    verify = session_module.verify_draft

    def wrong(*args, **kwargs):
        count, token, rejected = verify(*args, **kwargs)
        return count, (token + 1) % 290, rejected

    monkeypatch.setattr(session_module, "verify_draft", wrong)
    code, out, _ = run(capsys, *generate_arguments(models))
    assert code == 1
    assert "not equal to the target alone: token 2 differs" in out and "more than rounding explains" in out


def test_colours_follow_the_terminal(models, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    _, coloured, _ = run(capsys, *generate_arguments(models, "--no-compare"))
    assert "\x1b[33m" in coloured and "the target's own token" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    _, plain, _ = run(capsys, *generate_arguments(models, "--no-compare"))
    assert not re.search(r"\x1b\[3[0-9]m", plain) and "no colours here" in plain


# what is refused


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("generate", "--target", "{models}/nowhere", "--prompt", "x"), "target: no folder .*nowhere, must be the folder of a"),
        (("generate", "--target", "{models}", "--prompt", "x"), "no config.json in .*, must be the folder of a Transformers checkpoint"),
        (("generate", "--target", "{models}/target"), "generate: no --prompt was given, must have at least one"),
        (("generate", "--target", "{models}/target", "--prompt", ""), "generate: prompt has 0 tokens, must have at least 1"),
        (("generate", "--target", "{models}/target", "--prompt", "x", "--dtype", "int8"), "generate: dtype is 'int8', must be one of auto"),
        (("generate", "--target", "{models}/target", "--prompt", "x", "--temperature", "-1"), "generate: temperature is -1.0, must be 0"),
        (("generate", "--target", "{models}/target", "--prompt", "x", "--top-p", "2"), "generate: top_p is 2.0, must be above 0"),
        (("generate", "--target", "{models}/target", "--prompt", "x", "--max-new-tokens", "9999"), "must be at most the target's 256"),
        (("generate", "--target", "{models}/target", "--prompt", "x", "--chat"), "the target's tokenizer has no chat template"),
        (("generate", "--target", "{models}/target", "--drafter", "{models}/no", "--prompt", "x"), "drafter: no folder .*no, must be"),
        (("generate", "--target", "{models}/target", "--drafter", "{models}/target", "--prompt", "x"), "drafter in .*: .*architectures"),
        (("demo", "--models", "{models}", "--drafter", "dspark"), "demo: drafter is 'dspark', must be one of dflash"),
        (("demo", "--models", "{models}/target"), "target: no folder .*, must be the folder of a Transformers checkpoint"),
    ],
)
def test_refusals_are_one_sentence_and_code_2(models, arguments, sentence, capsys):
    code, out, err = run(capsys, *(argument.format(models=models) for argument in arguments))
    assert code == 2
    assert err.startswith("carryover: ") and err.count("\n") == 1, err
    assert re.search(sentence, err), err
    assert "Traceback" not in out + err


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens where PyTorch finds no GPU")
def test_refuses_a_gpu_that_is_not_there(models, capsys):
    code, _, err = run(capsys, *generate_arguments(models, "--device", "cuda"))
    assert code == 2 and "device is 'cuda', must be 'cpu': PyTorch finds no GPU here" in err


@pytest.mark.parametrize(
    "variable, value, sentence",
    [
        ("CARRYOVER_BACKEND", "CPU", "backend is 'CPU', must be one of auto, cpu, triton, cuda"),
        ("CARRYOVER_CPU_ISA", "mmx", "CARRYOVER_CPU_ISA is 'mmx', must be one of those this machine has"),
    ],
)
def test_a_wrong_variable_is_one_sentence_and_code_2(models, variable, value, sentence, backend):
    if backend == "reference":
        pytest.skip("a new process runs the native library, which this run may lack")
    command = [sys.executable, "-m", "carryover_kernels.cli", *map(str, generate_arguments(models))]
    done = subprocess.run(command, env=environment() | {variable: value}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("carryover: ") and done.stderr.count("\n") == 1, done.stderr
    assert sentence in done.stderr


def test_logits_that_are_not_finite_are_one_sentence(models, capsys, monkeypatch):
    judge = session_module.DecodingSession._judge
    monkeypatch.setattr(
        session_module.DecodingSession, "_judge", lambda self, requests, logits, *rest: judge(self, requests, logits * float("nan"), *rest)
    )
    code, _, err = run(capsys, *generate_arguments(models, "--no-compare"))
    assert code == 2 and err == "carryover: generate: the target's logits of request 0 are not finite, must be finite numbers\n"


def test_a_failure_of_ours_keeps_its_trace(models, monkeypatch, capsys):
    monkeypatch.setattr("carryover_kernels.cli.info.run_info", lambda: (_ for _ in ()).throw(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        run(capsys, "info")


def test_a_target_that_lacks_weights_is_refused(models, tmp_path, capsys):
    """Transformers would fill them with random numbers and only warn: a drafter's folder given as the target wrote nonsense."""
    shutil.copytree(models / "target", tmp_path / "target")
    weights = load_file(tmp_path / "target" / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "target" / "model.safetensors", {"format": "pt"})
    code, _, err = run(capsys, "generate", "--target", tmp_path / "target", "--prompt", "x")
    assert code == 2 and err.count("\n") == 1
    assert "lacks the weights of model.layers.1.mlp.down_proj.weight and 0 more, must hold all of the model" in err


def test_prompts_are_utf8_in_every_locale(models, capsys):
    surrogates = "h\u00e9 \u2192".encode().decode("ascii", "surrogateescape")  # what Python makes of them without UTF-8
    code, out, _ = run(capsys, "generate", "--target", models / "target", "--prompt", surrogates, "--max-new-tokens", 2)
    assert code == 0 and "h\u00e9 \u2192" in out
    code, _, err = run(capsys, "generate", "--target", models / "target", "--prompt", "x\udcff")
    assert code == 2 and err == "carryover: generate: prompt holds bytes that are no text, must be UTF-8\n"


def test_usage_errors_are_code_2(capsys):
    assert run(capsys, "generate")[0] == 2
    assert run(capsys, "demo", "--prompts", "0")[0] == 2
    assert run(capsys, "nonsense")[0] == 2


# info, train, record


def test_info_names_every_op_and_version(capsys):
    from carryover_kernels import __version__, ops

    code, out, _ = run(capsys, "info")
    assert code == 0
    for words in (*ops.__all__, __version__, f"torch {torch.__version__}", "cuda library", "cpu library", "not yet run on hardware"):
        assert words in out, words


@pytest.mark.parametrize("command", ["train", "record"])
def test_training_commands_get_their_arguments(command, monkeypatch, capsys):
    name = f"carryover_kernels.training.{command}"
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    given = []
    module.main = lambda arguments, prog: given.append((arguments, prog)) or 7
    monkeypatch.setitem(sys.modules, name, module)
    assert run(capsys, command, "--steps", 3, "--help", "x")[0] == 7
    assert given == [(["--steps", "3", "--help", "x"], f"carryover {command}")]


# text


def test_printer_waits_for_whole_characters(models, capsys):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "target", local_files_only=True)
    text = "é€😀 carry\x1b[31m\ttab\n"
    ids = tokenizer(text)["input_ids"]
    end = tokenizer.eos_token_id
    request = Request(0, [1], 99, stop_tokens=frozenset([end]))
    printer = Printer(new_console(), tokenizer, [1])
    pieces = []
    for token in [*ids, end]:
        printer(request, [token], ["draft"])
        pieces.append(capsys.readouterr().out)
    assert "".join(pieces) == text.replace("\x1b", "\ufffd")
    assert "".join(pieces[:9]) == "é€😀" and "\ufffd" not in "".join(pieces[:9])


# as a program


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def test_import_is_quick_and_imports_nothing_heavy():
    code = "import sys, carryover_kernels.cli.main; print([m for m in ('torch', 'transformers', 'triton', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


FINDER = """
class Finder:
    @staticmethod
    def find_spec(name, *_):
        if name == 'typer': exec({!r})
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize(
    "when, code",
    [
        # An import of C++ that cannot pass an exception on aborts: what presses here ends everything but an exit at once.
        (FINDER.format("class Aborts:\n    def __del__(self): press(); os.abort()\nAborts()"), 130),
        # As a dataclass would be: under -m CPython remembers that a string was interrupted, and ends by the signal.
        ("import carryover_kernels.cli.main as cli\ncli.main = lambda: (cli.listen(), exec('press()'))", 130),
        ("atexit.register(press)", 0),  # all is done: the commands' own code stays
    ],
    ids=["during_imports", "inside_exec", "while_python_ends"],
)
def test_ctrl_c_before_and_after_a_command(when, code, tmp_path):
    program = f"import atexit, os, signal, sys\ndef press(): os.kill(os.getpid(), signal.SIGINT)\n{when}\nsys.argv[1:] = ['--help']\n"
    program += "signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom carryover_kernels.cli.__main__ import run; run()"
    (tmp_path / "pressed.py").write_text(program)
    done = subprocess.run([sys.executable, "-m", "pressed"], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == code and done.stderr == "", done.stderr


@pytest.mark.parametrize("command", ["train", "record"])
def test_ctrl_c_while_training_or_recording_is_130(command, models, tmp_path, monkeypatch, capsys):
    """A step under way is finished, a batch of records begun anew later: whole ones are kept, and it is told where."""
    out, source = tmp_path / "out", tmp_path / "source.jsonl"
    source.write_text('{"prompt": "the quick brown", "prompt_ids": [2, 3], "response_ids": [4, 5, 6]}\n' * 6)
    arguments = [command, "--target", models / "target", "--out", out, "--batch", 2]
    if command == "train":
        from carryover_kernels.training.loop import Loop as where

        one = "_one"
        arguments += ["--records", source, "--drafter", models / "dflash", "--work", tmp_path / "work", "--steps", 4]
    else:
        from carryover_kernels.training import data as where

        one = "respond"
        arguments += ["--prompts", source, "--max-new-tokens", 4]
    step = getattr(where, one)

    def pressed(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        return step(*args, **kwargs)

    monkeypatch.setattr(where, one, pressed)
    code, _, err = run(capsys, *arguments)
    assert code == 130 and "the same command goes on from there" in err and err.count("\n") == 1, err


def test_ctrl_c_ends_with_130_and_what_was_done(models, backend):
    if backend == "reference":
        pytest.skip("a new process runs the native library, which this run may lack")
    arguments = [*generate_arguments(models, "--no-compare"), "--max-new-tokens", 240]
    command = [sys.executable, "-m", "carryover_kernels.cli", *map(str, arguments)]
    # A shell's background job, as a CI may be, ignores SIGINT and so would this child.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heard)
    seen = b""
    while b"the quick" not in seen:
        byte = process.stdout.read(1)
        assert byte, process.stderr.read().decode()
        seen += byte
    seen += process.stdout.read(8)  # the first tokens
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (seen + out + err).decode(errors="replace")
    assert b"interrupted: " in out and b"tokens/s" in out and b"Traceback" not in err
