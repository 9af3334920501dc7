"""Run the numerical tests with the arithmetic of other CPUs: python tools/kernels.py [--slow] [NAME ...]

Float results depend on the kernels that a library chooses for a CPU. Each setting below makes the libraries choose as
they would elsewhere, as far as environment variables and a preloaded library can. It ends with a line per setting, and
with status 1 if any failed.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
SETTINGS: dict[str, dict[str, str]] = {
    "as it is": {},
    "avx2": {**AVX2, "OPENBLAS_CORETYPE": "Haswell"},
    "no vectors": {"ATEN_CPU_CAPABILITY": "default", "OPENBLAS_CORETYPE": "Zen"},
    "mkl compatible": {"MKL_CBWR": "COMPATIBLE"},
    # Threads that sleep while they wait: else those of two processes on two cores keep each other from working.
    "two threads": {"EXITWISE_TEST_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
    "mkl for amd zen": {"PRELOAD": "-DZEN"},
    "mkl for other amd": {"PRELOAD": ""},
}


def main() -> int:
    slow = "--slow" in sys.argv
    names = [name for name in sys.argv[1:] if name != "--slow"] or list(SETTINGS)
    unknown = [name for name in names if name not in SETTINGS]
    if unknown:
        print(f"kernels.py: no setting is called {unknown[0]!r}; there are {', '.join(SETTINGS)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        lines = [_run(name, slow, Path(folder)) for name in names]
    print("\n".join(["", *lines]))
    return int(any("failed" in line for line in lines))


def _run(name: str, slow: bool, folder: Path) -> str:
    """Run the tests under one setting, and return its line of the summary."""
    variables = dict(SETTINGS[name])
    if (flags := variables.pop("PRELOAD", None)) is not None:
        if not shutil.which("cc") or platform.machine() != "x86_64" or platform.system() != "Linux":
            return f"{name}: left out, it needs a C compiler and Linux on x86-64"
        library = folder / f"amd{flags}.so"
        source = ROOT / "tools" / "amd_mkl.c"
        subprocess.run(["cc", "-shared", "-fPIC", *flags.split(), "-o", library, source], check=True)
        variables["LD_PRELOAD"] = str(library)
    print(f"== {name}: {' '.join(f'{key}={Path(value).name}' for key, value in variables.items())}", flush=True)
    which = "numerical" if slow else "numerical and not slow"
    command = [sys.executable, "-m", "pytest", "-q", "-m", which, "--numprocesses", "2", "--dist", "worksteal"]
    start = time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() if re.search(r"\d (passed|failed|error)", line) else last
    verdict = "passed" if process.returncode == 0 else "failed"
    return f"{name}: {verdict} in {time.monotonic() - start:.0f} s ({last.strip('= ')})"


if __name__ == "__main__":
    sys.exit(main())
