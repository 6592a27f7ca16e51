"""Write rlinf/envs/sim/calvin/sequences.json: the 1000 evaluation chains of CALVIN.

    python tools/make_calvin_sequences.py

A row is the number of an initial state and of five tasks. The draws are the benchmark's own (a legacy numpy generator
per initial state, then one shuffle), so that the chains are the ones everybody reports on.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlinf.simulators.calvin import symbolic


def main() -> None:
    counts = symbolic.chains_per_state()
    rows = [[state, *chain] for state, n in enumerate(counts) for chain in symbolic.draw_chains(state, n)]
    ordered = [rows[number] for number in symbolic.shuffled()]
    path = Path(symbolic.__file__).with_name("sequences.json")
    path.write_text("[" + ",\n".join(json.dumps(row) for row in ordered) + "]\n")
    print(f"{path}: {len(ordered)} chains")


if __name__ == "__main__":
    main()
