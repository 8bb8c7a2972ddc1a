#!/usr/bin/env bash
# Records what a GPU shows: the gpu tests, the benchmarks, the tour and the notebooks.
#   data/record.sh OUT        writes into the folder OUT; copy what is to be kept into data/recordings/
#   PARTS="tests headline:llama-3.1-8b static:llama-3.1-8b notebooks:04" data/record.sh OUT      only these, in this order
# A part that is ended by its time limit keeps what it had written.
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
    "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
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
bench() { name=$1; limit=$2; shift 2; step "$name" "$limit" python3 -m cgkit bench "$@"; }
ALL="tests launch modes tuned headline:llama-3.2-1b headline:llama-3.1-8b headline:opt-125m host:llama-3.2-1b
  static:llama-3.2-1b static:llama-3.1-8b passes:llama-3.2-1b custom_ops:llama-3.2-1b startup:llama-3.2-1b kernels
  engine:llama-3.2-1b serve:llama-3.2-1b boundaries ledgers:llama-3.2-1b hazards seeing events_off tour notebooks"
for part in ${PARTS:-$ALL}; do
  shape=; case $part in *:*) shape=${part#*:} ;; esac
  case $part in
    tests) # the test that fills the whole GPU runs alone
      step tests 420 python3 -m pytest -m gpu tests -q -rf --tb=short -p no:cacheprovider -n "${JOBS:-7}" \
        --ignore tests/capturing/test_out_of_memory.py
      step tests_alone 100 python3 -m pytest -m gpu tests/capturing/test_out_of_memory.py -q --tb=short \
        -p no:cacheprovider ;;
    modes) bench modes 300 modes --json ;;
    tuned) bench tuned 300 modes --shape llama-3.1-8b --batches 1 --no-first-call --tuned reductions-only --json ;;
    headline:*) bench "headline-$shape" 400 headline --shapes "$shape" --no-first-calls --json \
        --csv "$out/h200-headline-$shape.csv" --svg "$out/h200-headline-$shape.svg" ;;
    host:*) bench "host-$shape" 240 host --shape "$shape" --batches 1 32 --json --csv "$out/h200-host-$shape.csv" \
        --svg "$out/h200-host-$shape.svg" ;;
    static:*) bench "static-$shape" 300 static --shapes "$shape" --pieces ${PIECES:-middle} --batches ${BATCHES:-1 8 32} --repeats 50 \
        --csv "$out/h200-bench-static-$shape.csv" --candidates-csv "$out/h200-bench-static-candidates-$shape.csv" ;;
    passes:*) bench "passes-$shape" 240 passes --shape "$shape" --batches 1 32 --json --csv "$out/h200-bench-passes.csv" ;;
    custom_ops:*) bench "custom-ops-$shape" 180 custom-ops --shape "$shape" --batches 1 32 --json \
        --csv "$out/h200-bench-custom-ops.csv" ;;
    startup:*) bench "startup-$shape" 240 startup --models "$shape" --warm 1 --json --csv "$out/h200-bench-startup.csv" ;;
    kernels) bench kernels 100 kernels --json --csv "$out/h200-bench-kernels.csv" ;;
    engine:*) bench "engine-$shape" 120 engine --shape "$shape" --batches 1 8 32 --json --csv "$out/h200-bench-engine.csv" ;;
    serve:*) bench "serve-$shape" 300 serve --shape "$shape" --synthetic "${REQUESTS:-96}" --json --csv "$out/h200-bench-serve.csv" \
        --steps-csv "$out/h200-bench-serve-steps.csv" --histogram "$out/h200-bench-serve-histogram.csv" ;;
    seeing) step seeing 400 python3 data/record_seeing.py "$out/seeing" ;;
    events_off) bench events_off 90 events-off --json ;;
    boundaries) bench boundaries 60 boundaries --json --csv "$out/h200-bench-boundaries.csv" ;;
    ledgers:*) bench ledgers 90 ledgers --shape "$shape" --batch 1 --json --csv "$out/h200-bench-ledgers.csv" ;; # alone on the machine
    hazards) step hazards 200 python3 -m cgkit hazards run --device cuda --json --csv "$out/h200-hazards.csv" ;;
    launch) step launch 60 python3 -m cgkit.kernels.bench ;;
    tour) step tour 240 python3 -m cgkit tour --json --out "$out/tour.html" ;;
    notebooks*) # notebooks:02,03 only those, NOTEBOOKS at a time; needs jupytext, nbclient, ipykernel
      step "notebooks-$shape" 400 python3 notebooks/run.py --jobs "${NOTEBOOKS:-1}" ${shape//,/ }
      cp notebooks/[01]*.ipynb "$out" ;;
    *) echo "$part: there is no such part" >>"$out/status.txt" ;;
  esac
done
cat "$out/status.txt"
