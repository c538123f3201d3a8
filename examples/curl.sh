#!/usr/bin/env bash
# The training loop with nothing but curl: KEY=tml-... ./examples/curl.sh http://127.0.0.1:8000 MODEL
# With `Prefer: wait=SECONDS` a submit returns its result; without it, poll POST /api/v1/retrieve_future.
set -euo pipefail
URL=$1/api/v1
MODEL=$2
KEY=${KEY:-tml-local}

post() { # path body
  curl --silent --show-error --fail-with-body -H "X-API-Key: $KEY" -H 'Content-Type: application/json' \
    -H 'Prefer: wait=60' "$URL/$1" -d "$2"
}
field() { sed -n "s/.*\"$1\": *\"\([^\"]*\)\".*/\1/p"; }

SESSION=$(post create_session '{"sdk_version": "curl"}' | field session_id)
RUN=$(post create_model "{\"session_id\": \"$SESSION\", \"model_seq_id\": 0, \"base_model\": \"$MODEL\",
  \"lora_config\": {\"rank\": 8}}" | field model_id)
echo "training run $RUN"

SEQ=1 # numbers the operations of a run: they take effect in this order
for _ in 1 2 3; do
  post forward_backward "{\"model_id\": \"$RUN\", \"seq_id\": $((SEQ++)), \"loss_fn\": \"cross_entropy\", \"data\": [{
    \"model_input\": {\"chunks\": [{\"type\": \"encoded_text\", \"tokens\": [10, 11, 12, 13]}]},
    \"loss_fn_inputs\": {
      \"target_tokens\": {\"data\": [11, 12, 13, 14], \"dtype\": \"int64\", \"shape\": [4]},
      \"weights\": {\"data\": [1, 1, 1, 1], \"dtype\": \"float32\", \"shape\": [4]}}}]}"
  echo
  post optim_step "{\"model_id\": \"$RUN\", \"seq_id\": $((SEQ++)), \"adam_params\": {\"learning_rate\": 0.01}}"
  echo
done

post save_checkpoint "{\"model_id\": \"$RUN\", \"seq_id\": $((SEQ++)), \"path\": \"from-curl\"}"
echo
SAMPLER=$(post save_weights_for_sampler "{\"model_id\": \"$RUN\", \"seq_id\": $((SEQ++)),
  \"sampling_session_seq_id\": 0}" | field sampling_session_id)
post sample "{\"sampling_session_id\": \"$SAMPLER\", \"seq_id\": 0, \"num_samples\": 1,
  \"prompt\": {\"chunks\": [{\"type\": \"encoded_text\", \"tokens\": [10, 11]}]},
  \"sampling_params\": {\"max_tokens\": 4, \"temperature\": 0, \"stop\": []}}"
echo
curl --silent --show-error --fail-with-body -X POST -H "X-API-Key: $KEY" -H 'Content-Type: application/json' \
  "$URL/sessions/$SESSION/finish" -d '{"reason": {"type": "success"}}'
