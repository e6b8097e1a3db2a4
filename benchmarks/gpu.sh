#!/usr/bin/env bash
# Everything that needs a GPU, stage by stage, each with its own time limit; one that fails does not
# stop the next. The last lines are a table of stages.
#
#   benchmarks/gpu.sh [stage ...]
#
#   compile       FlashInfer's kernels, without an archive of them (in the background, while `tests` runs)
#   tests         kernel tests, compiled
#   flashinfer    those of its attention backend
#   float8        KV in float8: distances from bfloat16 and from Hugging Face; MODEL_DIR as below (not
#                 by default)
#   quantized     float8 weights: distances from what they stand for, and experts that mixtures choose (not
#                 by default)
#   host_tier     copies between the pool and host memory: tests, bandwidth, seconds to lock memory
#   correctness   against Hugging Face; MODEL_DIR=<dir> adds that model to the random ones,
#                 CORRECTNESS_OPTIONS go to gpu_correctness.py
#   kernels       time and bandwidth of each kernel
#   offline       the named workloads, nine in all; MODELS and WORKLOADS choose
#   pdl           bs1_decode with and without programmatic dependent launch
#   profile       phases, GPU idle share, Chrome trace
#   profile_small the same for the small model
#   serving       a whole worker over HTTP, 256 streams at once; MODELS chooses, SERVING_OPTIONS go
#                 to serving.py; after `offline`, or with OFFLINE="MODEL=RATE ...", compares with it
#   open_loop     conversations that come at 15 and 24 a second; MODELS chooses, OPEN_LOOP_OPTIONS go to
#                 open_loop.py (not by default)
#   multi_turn    conversations that are more than the GPU holds, with the host tier and without;
#                 MULTI_TURN_OPTIONS go to multi_turn.py (not by default)
#   tp            two GPUs: bs1_decode, bs64_decode, nano256
#   ranks         two GPUs: sums over the ranks, and draws from halves of the vocabulary, by each way
#   tp_correctness   two GPUs: the text of a random model, split, against Hugging Face;
#                 CORRECTNESS_OPTIONS in place of its own (--random chooses), and CORRECTNESS_MODES
#   ep_correctness   the same of a mixture whose experts are dealt out
#   pp, pp_correctness   the same of two stages; two stages on one GPU with
#                 CORRECTNESS_OPTIONS="--transport gloo", ENGINE_OPTIONS likewise
#   machines      two GPUs, each in a network namespace: the text of two stages over NCCL's sockets, and
#                 a rank killed, frozen, and cut off (`ip` and `ss` are needed)
#   pp_profile    what the first of two stages does, sends beside compute in its trace
#   faults        two GPUs: a rank killed, and one frozen, while clients ask, with tp 2 and with pp 2
#   dp            two GPUs: a worker of two members over HTTP, 512 streams at once, and one GPU's 256 to
#                 compare with; SERVING_OPTIONS go to serving.py
#
# Environment:
#   WORKLOADS, ENGINE_OPTIONS    for `offline`, in place of its own, and options of offline.py
#   OUT       where logs, results and traces go (default benchmarks/results/gpu)
#   WHEELS    folder of wheels to install beside what python3 has (default .whl)
#   COMPILED  archive of compiled FlashInfer kernels from an earlier $OUT (default .whl/flashinfer.tar.gz)
#   PACK      when set, logs, results and tuning end as one archive, $OUT/logs.tar.gz
#   RADIXGROVE_CACHE_DIR  where tuning is kept, for another run on the same machine (default $OUT/cache)
#   LIMIT     seconds for every stage, in place of the stage's own limit
set -uo pipefail
self=$(realpath "$0")
cd "$(dirname "$self")/.."

OUT=${OUT:-benchmarks/results/gpu}
WHEELS=${WHEELS:-.whl}
COMPILED=${COMPILED:-.whl/flashinfer.tar.gz}
MODELS=${MODELS:-llama-3.1-8b qwen3-0.6b}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
export BENCHMARK_RESULTS="$OUT" RADIXGROVE_CACHE_DIR="${RADIXGROVE_CACHE_DIR:-$OUT/cache}"
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

set_up() {
    if compgen -G "$WHEELS/*.whl" >/dev/null; then
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
            --target "$scratch/site" "$WHEELS"/*.whl || return
        export PYTHONPATH="$scratch/site:$PYTHONPATH"
    fi
    # Ranks compare versions, which is asked of a package's metadata.
    python3 -c 'from importlib.metadata import version; version("radixgrove")' 2>/dev/null ||
        { mkdir -p "$scratch/site/radixgrove-0.dist-info" &&
            printf 'Metadata-Version: 2.1\nName: radixgrove\nVersion: 0\n' >"$scratch/site/radixgrove-0.dist-info/METADATA" &&
            export PYTHONPATH="$scratch/site:$PYTHONPATH"; }
    if [[ -f $COMPILED ]]; then
        local prebuilt
        prebuilt=$(prebuilt_folder) || return
        mkdir -p "$prebuilt" && tar -xzf "$COMPILED" -C "$prebuilt"
    fi
    python3 -c 'import torch, triton; print(torch.__version__, triton.__version__,
        torch.cuda.get_device_name(), torch.cuda.device_count())'
}

prebuilt_folder() { python3 -c 'from flashinfer.jit import env; print(env.FLASHINFER_AOT_DIR)'; }

keep_compiled() {
    local prebuilt
    prebuilt=$(prebuilt_folder) || return
    (cd "$prebuilt" && find . -name '*.so' -print0 | tar --null -czf "$OUT/flashinfer.tar.gz" -T -)
}

run_compile() {
    [[ ! -f $COMPILED ]] || return 0
    python3 -m radixgrove.cli compile-kernels --head-dim 128 ${MODEL_DIR:+--head-dim 64} && keep_compiled
}

kernel_tests() {
    # Compiling takes most of the time, so several processes where pytest-xdist is.
    local workers=()
    python3 -c 'import xdist' 2>/dev/null && workers=(-n 8)
    # This folder's fixtures only: the project's others need more than a GPU machine may have. What
    # compiles without a GPU needs none.
    python3 -m pytest -q --maxfail=10 -c /dev/null --rootdir=. --confcutdir=tests/kernels \
        --import-mode=importlib -p no:cacheprovider -W ignore --hypothesis-profile whole "${workers[@]}" \
        --ignore=tests/kernels/test_compile.py --ignore=tests/kernels/test_registers.py tests/kernels -k "$1"
}

run_tests() { kernel_tests 'not flashinfer'; }

run_flashinfer() { kernel_tests flashinfer; }

run_float8() {
    # shellcheck disable=SC2086
    python3 -m benchmarks.correctness.gpu_float8 ${MODEL_DIR:+--model "$MODEL_DIR"} ${CORRECTNESS_OPTIONS:-}
}

run_quantized() {
    # shellcheck disable=SC2086
    python3 -m benchmarks.correctness.gpu_quantized ${CORRECTNESS_OPTIONS:-}
}

run_host_tier() { python3 -m benchmarks.engine.host_tier --tests; }

run_correctness() {
    # shellcheck disable=SC2086
    python3 -m benchmarks.correctness.gpu_correctness ${MODEL_DIR:+--model "$MODEL_DIR"} ${CORRECTNESS_OPTIONS:-}
}

run_kernels() { python3 -m benchmarks.engine.bench_kernels --only linear elementwise attention sampling; }

run_offline() {
    # One process a model, so that a failure or a leak of one does not reach the other.
    local status=0 model workloads
    for model in $MODELS; do
        workloads=${WORKLOADS:-nano256 bs1_decode bs64_decode shared_prefix}
        [[ $model == qwen3* || -n ${WORKLOADS:-} ]] || workloads+=" prefill_32x8k"
        # shellcheck disable=SC2086
        python3 -m benchmarks.engine.offline --model "$model" --workload $workloads ${ENGINE_OPTIONS:-} || status=$?
    done
    return $status
}

run_pdl() {
    local pdl
    for pdl in 0 1; do
        echo "programmatic dependent launch: $pdl"
        RADIXGROVE_PDL=$pdl python3 -m benchmarks.engine.offline --model qwen3-0.6b --workload bs1_decode \
            --label "pdl=$pdl" || return
    done
}

run_profile() {
    python3 -m benchmarks.engine.profile_engine --model llama-3.1-8b --trace "$OUT/llama-nano256.json.gz"
}

run_profile_small() {
    python3 -m benchmarks.engine.profile_engine --model qwen3-0.6b --trace "$OUT/qwen3-nano256.json.gz"
    python3 -m benchmarks.engine.profile_engine --model qwen3-0.6b --workload bs1_decode
}

run_serving() {
    local status=0 model
    for model in $MODELS; do
        # shellcheck disable=SC2086
        python3 -m benchmarks.load.serving --model "$model" ${OFFLINE:+--offline $OFFLINE} \
            ${SERVING_OPTIONS:-} || status=$?
    done
    return $status
}

run_open_loop() {
    local status=0 model
    for model in $MODELS; do
        # shellcheck disable=SC2086
        python3 -m benchmarks.load.open_loop --model "$model" ${OPEN_LOOP_OPTIONS:-} || status=$?
    done
    return $status
}

run_multi_turn() {
    # shellcheck disable=SC2086
    python3 -m benchmarks.load.multi_turn ${MULTI_TURN_OPTIONS:-}
}

run_tp() {
    python3 -m benchmarks.engine.offline --model llama-3.1-8b --tp 2 \
        --workload bs1_decode bs64_decode nano256
}

run_ranks() { python3 -m benchmarks.engine.bench_ranks; }

run_faults() {
    local status=0 ranks
    for ranks in tp pp; do
        python3 -m benchmarks.load.rank_faults -- "--$ranks" 2 || status=$?
    done
    return $status
}

run_tp_correctness() { split_correctness --tp 2; }

run_pp() {
    # shellcheck disable=SC2086
    python3 -m benchmarks.engine.offline --model llama-3.1-8b --pp 2 \
        --workload ${WORKLOADS:-bs1_decode bs64_decode nano256} ${ENGINE_OPTIONS:-}
}

run_pp_correctness() { split_correctness --pp 2; }

run_dp() {
    # shellcheck disable=SC2086
    python3 -m benchmarks.load.serving --model llama-3.1-8b --workload nano256 --label "dp 1" \
        ${SERVING_OPTIONS:-} &&
        python3 -m benchmarks.load.serving --model llama-3.1-8b --workload nano512 --label "dp 2" \
            --processes 8 ${SERVING_OPTIONS:-} -- --dp 2
}

run_pp_profile() {
    # shellcheck disable=SC2086
    python3 -m benchmarks.engine.profile_engine --model llama-3.1-8b --pp 2 ${ENGINE_OPTIONS:-} \
        --trace "$OUT/llama-nano256-pp2.json.gz"
}

run_ep_correctness() {
    CORRECTNESS_OPTIONS=${CORRECTNESS_OPTIONS:---random qwen3-moe-8-2} split_correctness --tp 2 --ep 2
}

run_machines() {
    local status=0
    python3 -m benchmarks.correctness.gpu_machines || status=$?
    python3 -m tests.drills.groups --kills 1 --freezes 1 --cuts 2 --gpus --record "$OUT" || status=$?
    return $status
}

split_correctness() {
    # A process for each mode: peer memory serves the first engine of a process only.
    local status=0 mode
    for mode in ${CORRECTNESS_MODES:-graphs chunked host-tier bfloat16}; do
        # shellcheck disable=SC2086
        python3 -m benchmarks.correctness.gpu_correctness "$@" --backend triton --modes "$mode" \
            ${CORRECTNESS_OPTIONS:---random llama-8-2} || status=$?
    done
    return $status
}

declare -A LIMITS=([compile]=300 [tests]=260 [flashinfer]=100 [float8]=150 [quantized]=280 [host_tier]=90 [correctness]=200 [kernels]=120 [offline]=200 [pdl]=90
    [profile]=120 [profile_small]=120 [serving]=180 [open_loop]=200 [multi_turn]=270 [tp]=240 [tp_correctness]=200 [ep_correctness]=150 [machines]=200 [pp]=240 [pp_correctness]=200
    [pp_profile]=150 [dp]=300 [ranks]=60 [faults]=200)
declare -A SHOWN=([compile]=3 [tests]=12 [flashinfer]=8 [float8]=60 [quantized]=40 [host_tier]=24 [correctness]=60 [kernels]=5 [offline]=16 [pdl]=8
    [profile]=26 [profile_small]=52 [serving]=30 [open_loop]=6 [multi_turn]=12 [tp]=8 [tp_correctness]=24 [ep_correctness]=24 [machines]=12 [pp]=8 [pp_correctness]=24
    [pp_profile]=26 [dp]=12 [ranks]=40 [faults]=8)
declare -A STATUS SECONDS_OF

run_stage() {
    local stage=$1 begin=$SECONDS
    # A stage is a process group of its own, so that its limit ends all it started.
    timeout --kill-after=10 "${LIMIT:-${LIMITS[$stage]}}" "$self" --inside "$stage" \
        >"$OUT/$stage.log" 2>&1
    STATUS[$stage]=$?
    SECONDS_OF[$stage]=$((SECONDS - begin))
}

show_stage() {
    echo "==== $1"
    grep -v '^\[\|Loading weights\|Writing model' "$OUT/$1.log" | tail -n "${SHOWN[$1]}" | cut -c1-160
}

if [[ ${1:-} == --inside ]]; then
    scratch=$FLASHINFER_WORKSPACE_BASE
    "run_$2"
    exit
fi

stages=("$@")
[[ ${#stages[@]} -gt 0 ]] || stages=(compile tests host_tier flashinfer correctness kernels offline pdl profile profile_small serving)
for stage in "${stages[@]}"; do
    [[ -n ${LIMITS[$stage]:-} ]] || { echo "no stage $stage; there are ${!LIMITS[*]}" >&2; exit 2; }
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export FLASHINFER_WORKSPACE_BASE="$scratch"
export PYTHONPATH="protocol:service:kernels:worker:cli${PYTHONPATH:+:$PYTHONPATH}"
set_up >"$OUT/set-up.log" 2>&1 || { echo "set-up failed:"; tail -20 "$OUT/set-up.log"; }
tail -1 "$OUT/set-up.log"

background=
for stage in "${stages[@]}"; do
    if [[ $stage == compile && ${#stages[@]} -gt 1 ]]; then
        # Kernel tests need little CPU; whatever needs FlashInfer waits below.
        timeout --kill-after=10 "${LIMIT:-${LIMITS[compile]}}" "$self" --inside compile \
            >"$OUT/compile.log" 2>&1 &
        background=$! compile_begin=$SECONDS
        continue
    fi
    if [[ -n $background && $stage != kernels && $stage != tests && $stage != host_tier ]]; then
        wait "$background"
        STATUS[compile]=$? SECONDS_OF[compile]=$((SECONDS - compile_begin)) background=
    fi
    run_stage "$stage"
done
if [[ -n $background ]]; then
    wait "$background"
    STATUS[compile]=$? SECONDS_OF[compile]=$((SECONDS - compile_begin))
fi

for stage in "${stages[@]}"; do show_stage "$stage"; done
if [[ -n ${PACK:-} ]]; then
    (
        shopt -s nullglob
        cd "$OUT" && mkdir -p cache && packed=(*.log *.jsonl cache) && tar -czf logs.tar.gz "${packed[@]}" && rm -r "${packed[@]}"
    )
fi
echo "==== stages"
failed=0
for stage in "${stages[@]}"; do
    printf '%-14s %-5s %4d s\n' "$stage" \
        "$([[ ${STATUS[$stage]} == 0 ]] && echo ok || echo "rc ${STATUS[$stage]}")" "${SECONDS_OF[$stage]}"
    [[ ${STATUS[$stage]} == 0 ]] || failed=1
done
exit $failed
