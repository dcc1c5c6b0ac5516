"""Compiles the small programs of `toys.py` for hardware that is not there, into .hlo files.

    python tests/programs/make.py GB200 tests/programs      (or v5p; needs the extra `plan`)

The files are what the compilers of those versions really wrote; names of folders on the machine are taken out.
"""

import importlib.metadata
import os
import sys
from pathlib import Path

from longtrain.plan.targets import target

HERE = Path(__file__).parent

if __name__ == "__main__":
    aim = target(sys.argv[1], 8)
    os.environ.update(aim.environment)
    os.environ["XLA_FLAGS"] = " ".join(aim.flags)
    sys.path.insert(0, str(HERE))

    import toys

    for name, lowered in toys.lowered(aim.abstract_devices()).items():
        text = lowered.compile().as_text().replace(f"{HERE}/", "tests/programs/")
        file = Path(sys.argv[2]) / f"{name}.{aim.kind}.{importlib.metadata.version('jaxlib')}.hlo"
        file.write_text(text, encoding="utf-8")
        print(file, len(text))
