#!/bin/bash
# Trains the policy on a Ray cluster: the learner on one GPU, actors on CPU cores of any node. Install autoshard[ray] on all
# nodes, then: RAY_ADDRESS=http://HEAD:8265 deploy/jobs/train-ray.sh
# Set the paths; they lie on a file system that all nodes share.
set -euo pipefail

RUN=/shared/autoshard

ray job submit --entrypoint-num-gpus 1 --entrypoint-num-cpus 2 -- \
  autoshard train policy --registry "$RUN/registry" --device cuda --accelerator cuda --ray --ray-address auto \
  --actors 16 --seconds 3600 --checkpoint "$RUN/policy-run" --tensorboard "$RUN/logs"
