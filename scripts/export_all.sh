#!/usr/bin/env bash
# Export many datasets, one cache each; finished ones are recognised and skipped, interrupted ones go on.
#
#     MODEL=Qwen/Qwen3-VL-8B-Instruct scripts/export_all.sh data/a.jsonl s3://bucket/data/b.jsonl
#
# A cache lies beside its dataset, or under OUTPUT_ROOT. Further options of packtool export stand in EXPORT_OPTIONS.
# A dataset that fails does not stop the others; the exit code is that of the last failure.
set -uo pipefail

: "${MODEL:?set MODEL to a directory or hub id of a model}"
max_length=${MAX_LENGTH:-10240}
read -r -a options <<< "${EXPORT_OPTIONS:-}"

status=0
for dataset in "$@"; do
  name=$(basename "$dataset")
  stem=${name%%.*}
  output="${OUTPUT_ROOT:-$(dirname "$dataset")}/${stem}_cached_len${max_length}"
  echo "== $dataset -> $output"
  # The same command again: packtool says "already finished", or goes on after the last finished shard.
  packtool export --model "$MODEL" --dataset "$dataset" --max-length "$max_length" --output-dir "$output" \
    --dataset-num-proc "${NUM_PROC:-$(nproc)}" ${options[@]+"${options[@]}"} || status=$?
done
exit "$status"
