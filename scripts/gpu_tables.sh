#!/usr/bin/env bash
# The papers' efficiency tables on one GPU, with random weights of the exact architectures, in short parts.
#
#   scripts/gpu_tables.sh [--dry-run] [PART...]
#
# Parts stand in order of value. Each is stopped after 8 minutes, and none begins that does not fit into the 40 minutes
# in all (MINUTES=). Run it again to go on: what is measured is kept in results/gpu (FOLDER=) and not measured again.
# KVBENCH_GPU_TABLES_SMALL=1 runs the same parts at sizes that a CPU does in seconds, with the small model.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-$(test -x .venv/bin/python && echo .venv/bin/python || echo python)}
SMALL=${KVBENCH_GPU_TABLES_SMALL:-0}
FOLDER=${FOLDER:-results/gpu}
MINUTES=${MINUTES:-40}
PART_SECONDS=480
KIVI="method=kivi,kivi+think bits=4 ratio=0.4,0.5"
UNCOMP="model=llama2-7b-chat preset=uncomp method=uncomp-stage+uncomp-group,uncomp-group grouping=random least_size=512 kv_size=384"
BASELINES="model=llama2-7b-chat preset=uncomp method=h2o,pyramidkv,snapkv kv_size=384"
VATP="model=llama2-7b-chat preset=vatp method=scissorhands,scissorhands+vatp half_ratio=0.25,0.125"
QHITTER="model=opt-6.7b preset=qhitter method=h2o,qhitter kv_ratio=0.2 bits=4"
LONG="model=mistral-7b-instruct-v0.2"
REFREEKV="model=llama3-8b-instruct preset=refreekv"

# name | minutes, mostly estimated | arguments of bench time
PARTS="\
think10   | 4 | model=llama2-7b $KIVI workloads=160+338x300 repeats=2 generate=sampled steps=16
uncomp3   | 2 | $UNCOMP workloads=3500+64x1 repeats=3
uncomp3   | 1 | $BASELINES workloads=3500+64x1 repeats=2
vatp4     | 3 | $VATP workloads=4096+128x12 repeats=1
think11   | 4 | model=llama2-7b $KIVI workloads=160+338xmax memory_limit=30 repeats=2 generate=sampled steps=16
uncomp10  | 2 | $UNCOMP workloads=3712+384x1,3712+384x4,3712+384x8 repeats=1 generate=sampled steps=16
targets   | 3 | $LONG method=snapkv,think kv_size=1024 workloads=16384+64x8,16384+64x1 repeats=2
qhitter2  | 3 | $QHITTER workloads=512+32x16 repeats=1 peers=dynamic,offload,deepspeed,flexgen
refreekv10| 2 | $REFREEKV method=refreekv peers=accelerate workloads=512+512x8,512+512x16,2048+2048x16,4096+4096x8 repeats=1 generate=sampled steps=16
formats   | 1 | model=llama2-7b method=fp8,q8_0,q4_0,turboquant workloads=4096+64x8 repeats=1 generate=sampled steps=16
think3b   | 3 | model=llama2-7b-chat method=kivi,kivi+think ratio=0.4 bits=2,4 workloads=160+338x32,160+338x64,160+338x128 repeats=1 generate=sampled steps=16
refreekv3 | 2 | $REFREEKV method=refreekv,h2o,streamingllm,snapkv kv_ratio=0.5 workloads=7500+32x1,7500+128x1 repeats=3
check     | 1 | model=llama2-7b method=kivi bits=4 workloads=160+338x16 repeats=1 generate=sampled steps=16 check=true
targets   | 2 | $LONG method=snapkv kv_size=1024 workloads=16384+64x1,16384+64x8 repeats=1 step=plain,graph
uncomp10  | 3 | $UNCOMP workloads=3712+384x10,3712+384x12,4032+64x1,4032+64x8,4032+64x10 repeats=1 generate=sampled steps=16
refreekv10| 2 | $REFREEKV method=refreekv peers=accelerate workloads=512+4096x2,4096+8192x1,4096+8192x2,8192+16384x1 repeats=1 generate=sampled steps=64
qhitter2  | 2 | $QHITTER workloads=512+512x16,512+1024x16 repeats=1 peers=deepspeed,flexgen generate=sampled steps=16"

small() {  # the same arguments at sizes of seconds
  sed -E -e 's/model=[^ ]+/model=tiny/' -e 's/workloads=[^ ]*xmax/workloads=160+6xmax/' -e 's/memory_limit=[^ ]+/memory_limit=0.02/' \
    -e 's/workloads=[^ ]*x[0-9]+/workloads=160+6x2/' -e 's/kv_size=[0-9]+/kv_size=130/' -e 's/repeats=[0-9]+/repeats=1/' \
    -e 's/steps=[0-9]+/steps=1/'
}

dry=0
if [ "${1:-}" = "--dry-run" ]; then dry=1; shift; fi
wanted=" $* "
left=$((MINUTES * 60))
failed=0
while IFS='|' read -r name minutes arguments; do
  name=${name// /} minutes=${minutes// /}
  if [ "$wanted" != "  " ] && [[ "$wanted" != *" $name "* ]]; then continue; fi
  [ "$SMALL" = 1 ] && arguments=$(small <<<"$arguments")
  [[ "$arguments" == *peers=* ]] || arguments="$arguments peers=none"
  echo "== $name, about $minutes min: bench time$arguments"
  [ $dry = 1 ] && continue
  if [ "$SMALL" != 1 ] && [ $((minutes * 60)) -gt $left ]; then
    echo "left out: $((left / 60)) min of $MINUTES are left; run the script again to go on"
    continue
  fi
  began=$SECONDS
  # in the foreground: an interrupt is for the part, too
  # shellcheck disable=SC2086
  timeout --foreground --signal=INT --kill-after=20 $PART_SECONDS "$PYTHON" -m kvbench bench time $arguments folder="$FOLDER" name="$name" </dev/null
  status=$?
  left=$((left - (SECONDS - began)))
  [ $status = 130 ] && exit 130
  [ $status = 124 ] && echo "stopped after $PART_SECONDS s; workloads that were finished are kept"
  [ $status = 0 ] || failed=1
done <<<"$PARTS"
"$PYTHON" -m kvbench.papers.timed.bench_spec
exit $failed
