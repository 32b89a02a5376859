#!/usr/bin/env bash
# vLLM alone and behind Forebay on this machine's GPUs, then three studies: make study-h200 [TRACE=FILE]
#
# 1. A vLLM server on each GPU, without and with --long-prefill-token-threshold. For each seed, one
#    trace of chats beside long documents goes to the servers in turn, and through Forebay.
# 2. The studies hol, shared-document and saturation on the first GPU.
# 3. One page, OUT/study.md: the results, the machine, and the steps that were left out.
# Each step is bounded in time, and left out when its results are there already, so the command can
# be given again. `forebay fleet up` starts the servers, and checks each flag with the installed
# vLLM first. Settings, all optional:
#   MODEL   the served model             VLLM     the vllm command
#   GPUS    numbers, as 0,1              OUT      folder of the results
#   GPU     data sheet for saturation    CONTEXT  longest context, tokens
#   SEEDS   one trace for each           TRACE    a file to replay once per seed instead
#   VLLM_FLAGS   more flags for each server, such as --load-format dummy
#   FOREBAY, PYTHON   the forebay command, and the Python that it runs on
#   TARGET  URL of a server that runs already: only the studies, and nothing is started
set -euo pipefail
MODEL=${MODEL:-microsoft/Phi-3-mini-128k-instruct}
VLLM=${VLLM:-vllm}
FOREBAY=${FOREBAY:-forebay}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-runs/study-h200}
GPUS=${GPUS:-${CUDA_VISIBLE_DEVICES:-}}
GPU=${GPU:-h200}
TARGET=${TARGET:-}
CONTEXT=${CONTEXT:-122880}
SEQS=${SEQS:-256}
THRESHOLD=${THRESHOLD:-2048}
SEEDS=${SEEDS:-1 2 3}
TRACE=${TRACE:-}
DURATION=${DURATION:-90} # seconds of arrivals in a run
CHAT_RATE=${CHAT_RATE:-4.2} # chats a second for each GPU
DOCUMENT_RATE=${DOCUMENT_RATE:-0.08} # requests about documents a second for each GPU
PROMPT=${PROMPT:-$((CONTEXT - 2880))} # tokens of a document; leaves room for question and answer
DOCUMENT=${DOCUMENT:-$((PROMPT / 2))} # tokens of the document of shared-document
TIME_SCALE=${TIME_SCALE:-1} # above 1 for simulated servers only
PORT=${PORT:-8001} # of the first server
PROXY_PORT=${PROXY_PORT:-8080}
ADMIN_PORT=${ADMIN_PORT:-9090}
LEVELS=${LEVELS:-1,2,4,8,16,32,64,128,256,512}
LIMIT=${LIMIT:-1800} # seconds that a run or a study may take
READY=${READY:-1200} # seconds that servers may take to load
SETTLE=${SETTLE:-5} # seconds until the memory of a stopped server is free
VLLM_FLAGS=${VLLM_FLAGS:-}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
FLEETS=(default flag whole chunks studies)
started=()
fleets=()
failed=0

say() { echo "study-h200: $*"; }

# leave_out WORDS...: the reason that the page gives for a step without results
leave_out() {
  say "left out: $*" >&2
  echo "$*" >>"$OUT/left-out.txt"
  failed=1
}

# begun: note the process that was started last, for `stop` and for a later command
begun() {
  started+=("$!")
  echo "$!" >>"$OUT/servers/pids"
}

# stop: end the processes and fleets that this command started, the last first
stop() {
  local at name
  for ((at = ${#started[@]} - 1; at >= 0; at--)); do
    kill "${started[at]}" 2>/dev/null || true
    wait "${started[at]}" 2>/dev/null || true
  done
  for name in "${fleets[@]}"; do "$FOREBAY" fleet down --dir "$OUT/servers/$name" >/dev/null 2>&1 || true; done
  started=()
  fleets=()
}
trap stop EXIT
trap 'exit 130' INT TERM

# bounded WORDS...: run a command within LIMIT; a signal to this script ends it at once
bounded() {
  local status=0
  timeout --kill-after=30 "$LIMIT" "$@" &
  begun
  wait "$!" || status=$?
  unset 'started[-1]'
  return "$status"
}

# fleet NAME GPUS PORT SHARE FLAGS...: a server on each of the GPUs, with vLLM's own scheduling but
# for FLAGS. Returns 1 with the reason in $why.
fleet() {
  local name=$1 dir=$OUT/servers/$1 gpus=$2 port=$3 share=$4 status=0
  shift 4
  mkdir -p "$dir"
  local words=(--model "$MODEL" --vllm "$VLLM" --dir "$dir" --port "$port" --no-kv-events
    --max-model-len "$CONTEXT" --max-num-seqs "$SEQS" --gpu-memory-utilization "$share"
    --drain 0 --start-timeout "$READY" --json)
  [[ -z $gpus ]] || words+=(--gpus "$gpus")
  # shellcheck disable=SC2206  # VLLM_FLAGS holds words
  local flags=(--scheduling-policy fcfs "$@" $VLLM_FLAGS)
  say "starting vLLM: ${flags[*]}"
  "$FOREBAY" fleet up "${words[@]}" -- "${flags[@]}" >"$dir/up.json" 2>"$dir/up.log" &
  begun
  wait "$!" || status=$?
  unset 'started[-1]'
  if ((status)); then
    why=$(grep -E 'forebay fleet:|ended with|was not up' "$dir/up.log" | tail -n 1 || true)
    why=${why:-$(tail -n 1 "$dir/up.log")}
    why=${why#forebay fleet: }
    return 1
  fi
  fleets+=("$name")
  facts "$dir"
}

# facts DIR: the facts on the page about the machine and the servers in DIR, as `key: value`
facts() {
  local python
  read -ra python < <(head -n 1 "$(command -v "$VLLM")" | tr -d '#!\0')
  {
    echo "date: $(date -u +%Y-%m-%d)"
    echo "commit: $(git -C "$HERE" describe --always --dirty 2>/dev/null || echo unknown)"
    echo "torch: $("${python[@]}" -c "import importlib.metadata as m; print(m.version('torch'))" 2>/dev/null || echo unknown)"
    nvidia-smi --query-gpu=index,name,driver_version --format=csv,noheader 2>/dev/null | sed 's/^/gpu: /' || true
    cat "$1"/gpu*.log | sed -n 's/^--- .* serve /server: vllm serve /p' | tail -n 1
    sed -n '/^left out/,/^$/p' "$1/up.log" | sed -n 's/^  \(--[^ ]*\).*/lacks: \1/p'
  } >"$1/facts.txt"
}

# urls NAME: the servers of a fleet that is up, one a line
urls() {
  "$PYTHON" -c 'import json, sys; print(*(s["url"] for s in json.load(open(sys.argv[1]))["servers"]), sep="\n")' \
    "$OUT/servers/$1/up.json"
}

# proxy NAME: Forebay in front of the fleet NAME, with the configuration that `fleet up` wrote
proxy() {
  if curl -s -o /dev/null "http://127.0.0.1:$PROXY_PORT/health"; then
    why="something else listens on port $PROXY_PORT: give another PROXY_PORT"
    return 1
  fi
  "$FOREBAY" proxy --config "$OUT/servers/$1/proxy.yaml" --port "$PROXY_PORT" \
    --admin-port "$ADMIN_PORT" >"$OUT/servers/$1/proxy.log" 2>&1 &
  begun
  for _ in {1..100}; do
    curl -sf -o /dev/null "http://127.0.0.1:$PROXY_PORT/health" && return
    kill -0 "${started[-1]}" 2>/dev/null || break
    sleep 0.2
  done
  why="the proxy did not start: $(tail -n 1 "$OUT/servers/$1/proxy.log")"
  return 1
}

# complete NAME: whether the run is there, from its first arrival to its last answer
complete() { grep -qs '"ended": *"complete"' "$OUT/runs/$1/run.json"; }

# run NAME TRACE WORDS...: replay the trace, unless the run is there
run() {
  local name=$1 trace=$2 servers=$OUT/servers/${1%%-*} status=0
  shift 2
  if complete "$name"; then return; fi
  say "run $name"
  bounded "$FOREBAY" replay "$trace" --out "$OUT/runs/$name" --force --quiet --salt "$name" \
    --duration "${DURATION}s" --max-model-len "$CONTEXT" --too-long drop \
    --time-scale "$TIME_SCALE" "$@" >"$OUT/runs/$name.log" 2>&1 || status=$?
  if ((status == 124 || status == 137)); then
    leave_out "run $name: it took more than $LIMIT s"
  elif ! complete "$name"; then
    leave_out "run $name: replay ended with status $status: $(tail -n 1 "$OUT/runs/$name.log")"
  elif ! "$FOREBAY" fleet status --dir "$servers" >"$servers/status.txt" 2>&1; then
    rm -r "$OUT/runs/$name" # it measured a server that died
    leave_out "run $name: not all servers were well: $(grep -v healthy "$servers/status.txt" | head -n 2 | tail -n 1)"
  fi
}

# compared KIND FLAGS...: the runs of all seeds on servers with FLAGS, alone and behind Forebay
compared() {
  local kind=$1 seed way missing='' targets=() metrics=() url
  shift
  for seed in $SEEDS; do
    for way in direct forebay; do complete "$kind-$way-$seed" || missing=1; done
  done
  if [[ -z $missing ]]; then
    say "the runs $kind-* are there already, in $OUT/runs"
    return
  fi
  if ! fleet "$kind" "$GPUS" "$PORT" 0.9 "$@"; then
    local before=$failed
    leave_out "the runs $kind-*: $why"
    [[ $kind != flag || $why != *"no such flag"* ]] || failed=$before # vLLM lacks it: no fault
    return 1
  fi
  while read -r url; do
    targets+=(--target "$url")
    metrics+=(--metrics "$url/metrics")
  done < <(urls "$kind")
  if ! proxy "$kind"; then
    leave_out "the runs $kind-*: $why"
    stop
    return 1
  fi
  for seed in $SEEDS; do
    run "$kind-direct-$seed" "$(trace_of "$seed" "$((${#targets[@]} / 2))")" "${targets[@]}" "${metrics[@]}"
    run "$kind-forebay-$seed" "$(trace_of "$seed" "$((${#targets[@]} / 2))")" \
      --target "http://127.0.0.1:$PROXY_PORT" "${metrics[@]}"
  done
  stop
  sleep "$SETTLE"
}

# trace_of SEED GPUS: the trace's file, made when it is not there
trace_of() {
  local file=$OUT/traces/seed-$1.jsonl
  if [[ -n $TRACE ]]; then
    echo "$TRACE"
    return
  fi
  if [[ ! -s $file ]]; then
    "$FOREBAY" traces synth chat-beside-documents --seed "$1" --duration "${DURATION}s" \
      --chat-rate "$(awk "BEGIN {print $CHAT_RATE * $2}")" \
      --document-rate "$(awk "BEGIN {print $DOCUMENT_RATE * $2}")" --questions 2 \
      --document-tokens "$PROMPT" --force --quiet -o "$file" >&2
  fi
  echo "$file"
}

# study NAME WORDS...: run it within LIMIT, unless it is there
study() {
  local name=$1 status=0
  shift
  if [[ -e $OUT/$name/results.json ]]; then
    say "$name is there already, in $OUT/$name"
    return
  fi
  say "$name"
  # --force: the files of an unfinished study are replaced
  bounded "$FOREBAY" experiment "$name" --out "$OUT/$name" --force \
    --time-scale "$TIME_SCALE" "$@" 2>"$OUT/$name.log" || status=$?
  cat "$OUT/$name.log" >&2
  if ((status == 124 || status == 137)); then
    leave_out "study $name: it took more than $LIMIT s"
  elif [[ ! -e $OUT/$name/results.json ]]; then
    leave_out "study $name: it ended with status $status: $(tail -n 1 "$OUT/$name.log")"
  fi
}

# hol_servers: two servers share one GPU's memory; hol asks first one, then the other. The first takes a
# prompt whole, the second in chunks.
hol_servers() {
  fleet whole "$first_gpu" "$PORT" 0.45 --long-prefill-token-threshold 0 \
    --max-num-batched-tokens "$CONTEXT" &&
    fleet chunks "$first_gpu" "$((PORT + 1))" 0.45 --long-prefill-token-threshold 0 \
      --max-num-batched-tokens 2048
}

# clear_leftovers: end processes that a killed command has left, found by number and by OUT in their words
clear_leftovers() {
  local pid name
  while read -r pid; do
    if tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF -- "$OUT/"; then kill "$pid" || true; fi
  done < <(cat "$OUT/servers/pids" 2>/dev/null)
  for name in "${FLEETS[@]}"; do
    if [[ -e $OUT/servers/$name/state.json ]]; then
      "$FOREBAY" fleet down --dir "$OUT/servers/$name" >/dev/null 2>&1 || true
    fi
  done
  : >"$OUT/servers/pids"
}

# report: charts of the first seed's runs, beside the page
report() {
  local kind way seed=${SEEDS%% *} runs=()
  for kind in default flag; do
    for way in direct forebay; do
      if complete "$kind-$way-$seed"; then runs+=("$OUT/runs/$kind-$way-$seed"); fi
    done
  done
  [[ ${#runs[@]} != 0 ]] || return 0
  "$FOREBAY" report "${runs[@]}" -o "$OUT/report.html" --force --quiet &&
    say "charts of seed $seed are in $OUT/report.html" || true
}

mkdir -p "$OUT/runs" "$OUT/traces" "$OUT/servers"
: >"$OUT/left-out.txt"
why=
first_gpu=${GPUS%%,*}
first_gpu=${first_gpu:-0}
if [[ -n $TARGET ]]; then
  leave_out "the comparison: TARGET is a server that runs already, and its flags cannot change"
  failed=0
  study hol --target "$TARGET" --prompt-tokens "$PROMPT"
  study shared-document --target "$TARGET" --document-tokens "$DOCUMENT"
  study saturation --target "$TARGET" --concurrency "$LEVELS"
else
  clear_leftovers
  if ! compared default --long-prefill-token-threshold 0; then
    exit 1 # nothing else would start either
  fi
  compared flag --long-prefill-token-threshold "$THRESHOLD" || true
  if [[ ! -e $OUT/hol/results.json ]]; then
    if hol_servers; then
      study hol --target "http://127.0.0.1:$PORT" --target "http://127.0.0.1:$((PORT + 1))" \
        --prompt-tokens "$PROMPT"
    else
      leave_out "study hol: $why"
    fi
    stop
    sleep "$SETTLE"
  fi
  if [[ ! -e $OUT/shared-document/results.json || ! -e $OUT/saturation/results.json ]]; then
    if fleet studies "$first_gpu" "$PORT" 0.9 --long-prefill-token-threshold 0; then
      study shared-document --target "http://127.0.0.1:$PORT" --document-tokens "$DOCUMENT"
      study saturation --target "http://127.0.0.1:$PORT" --gpu "$GPU" --concurrency "$LEVELS"
    else
      leave_out "studies shared-document and saturation: $why"
    fi
    stop
  fi
fi
"$PYTHON" "$HERE/study_page.py" "$OUT"
report
say "the page is $OUT/study.md"
exit "$failed"
