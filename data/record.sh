#!/usr/bin/env bash
# Records what a GPU shows: the gpu tests, the benchmarks, the tour and the notebook.
#   data/record.sh OUT        writes into the folder OUT; copy what is to be kept into data/recordings/
# Needs the package's dependencies on the path; COMMIT names the commit if this is no git checkout.
set -u
cd "$(dirname "$0")/.."
out=${1:?a folder to write into}
mkdir -p "$out"
commit=${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
python3 - "$out/manifest.json" "$commit" <<'PY'
import datetime, json, platform, sys
import torch, triton
facts = {
    "command": "data/record.sh OUT",
    "commit": sys.argv[2],
    "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    "gpu": torch.cuda.get_device_name(),
    "cuda": torch.version.cuda,
    "torch": torch.__version__,
    "triton": triton.__version__,
    "python": platform.python_version(),
}
try:
    import subprocess
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    import transformers
    facts["transformers"] = transformers.__version__
except Exception as error:
    facts["note"] = repr(error)
json.dump(facts, open(sys.argv[1], "w"), indent=1)
PY
step() { # NAME SECONDS COMMAND...: one step, its output in NAME.txt, its exit status in status.txt
  name=$1; limit=$2; shift 2
  timeout "$limit" "$@" >"$out/$name.txt" 2>"$out/$name.err"
  echo "$name: exit status $?: $*" >>"$out/status.txt"
}
: >"$out/status.txt"
for part in ${PARTS:-tests launch modes seeing events_off tour notebook}; do
  case $part in
    tests) # the test that fills the whole GPU runs alone
      step tests 400 python3 -m pytest -m gpu tests -q --tb=short -p no:cacheprovider -n "${JOBS:-4}" \
        --ignore tests/capturing/test_out_of_memory.py
      step tests_alone 100 python3 -m pytest -m gpu tests/capturing/test_out_of_memory.py -q --tb=short \
        -p no:cacheprovider ;;
    modes) step modes 300 python3 -m cgkit bench modes --json ;;
    headline) step headline 560 python3 -m cgkit bench headline --json --csv "$out/h200-headline.csv" \
        --svg "$out/h200-headline.svg" ;;
    host) step host 240 python3 -m cgkit bench host --batches 1 32 --json --csv "$out/h200-host-llama-3.2-1b.csv" \
        --svg "$out/h200-host-llama-3.2-1b.svg" ;;
    seeing) step seeing 400 python3 data/record_seeing.py "$out/seeing" ;;
    events_off) step events_off 90 python3 -m cgkit bench events-off --json ;;
    launch) step launch 60 python3 -c "
import json
from cgkit.kernels.bench import bench_launch
print(json.dumps(bench_launch(), indent=1))" ;;
    tour) step tour 240 python3 -m cgkit tour --json --out "$out/tour.html" ;;
    notebook) step notebook 200 python3 -c "
import nbformat, sys
from nbclient import NotebookClient
book = nbformat.read('notebooks/00_tour.ipynb', 4)
NotebookClient(book, timeout=180, kernel_name='python3', resources={'metadata': {'path': 'notebooks'}}).execute()
nbformat.write(book, '$out/00_tour.ipynb')" ;;
  esac
done
cat "$out/status.txt"
