"""A drafter checkpoint alone: absorb a prompt's states, propose a block, be partly rejected, propose with the rejected rows carried.

python examples/drafter.py [CHECKPOINT_FOLDER] [TARGET_FOLDER]   (default: the drafter that ships with the package)
"""

import pathlib
import sys

import torch
from safetensors.torch import load_file

import carryover_kernels
from carryover_kernels.drafter import CarryoverDrafter

models = pathlib.Path(carryover_kernels.__file__).parent / "models"
path = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else models / "dflash"
target_path = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else models / "target"
target = {}
for file in sorted(target_path.glob("*.safetensors")):  # a drafter without an embedding of its own borrows the target's
    target |= {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
embed = target.get("embed_tokens.weight")
drafter = CarryoverDrafter.from_pretrained(path, embed_tokens=embed, lm_head=target.get("lm_head.weight", embed))
config = drafter.config
print(f"{config.format} drafter of {config.num_layers} layers: {config.num_draft_tokens} proposals a block, taps {config.taps}")

torch.manual_seed(0)  # stand-in for the target's tap states, [rows, taps x hidden]
width = drafter.tensors["fc.weight"].shape[1]
prompt, verified = (torch.randn(n, width).to(drafter.dtype) for n in (12, config.num_draft_tokens + 1))


def rows(*values):
    return torch.tensor(values, dtype=torch.int32)


state = drafter.new_state(max_requests=1, page_size=16, num_pages=8, carry=True)
slot = state.allocate(num_tokens=64)
drafter.absorb(state, [slot], prompt, rows(0, 12), rows(0), torch.arange(12))
print("first block:           ", drafter.propose(state, [slot], torch.tensor([1])).tokens[0].tolist())

rejected = config.num_draft_tokens - 2  # the target kept two drafts: anchor + 2 rows are committed, the others carried
n = verified.shape[0]
drafter.absorb(state, [slot], verified, rows(0, n), rows(rejected), torch.arange(12, 12 + n))
print(f"with {int(state.carry_lens[slot])} carried rows:   ", drafter.propose(state, [slot], torch.tensor([2])).tokens[0].tolist())
state.clear([slot])
print("with them forgotten:   ", drafter.propose(state, [slot], torch.tensor([2])).tokens[0].tolist())
