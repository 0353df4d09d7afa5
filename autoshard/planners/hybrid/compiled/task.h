/* Written by `python -m scripts.compiled_header`, of what library.py declares. */

#include <stdint.h>

/* Parts of a step, in this order: input, forward_kernel, forward_exchange, backward_exchange, backward_kernel. */
enum { PARTS = 5, LANES = 4, PADDED_PARTS = 8 };
/* What a call does. */
enum { DESCEND = 0, LAUNCH_BY_LAUNCH = 1, RUIN = 2 };

/* A layout and what it is changed by; see search.c for the letters. */
typedef struct {
  int32_t num_items, num_ranks, padded_ranks, num_levels, num_launches, node_size, max_shards, num_synced;
  const int32_t *first_option_i;
  const int32_t *first_shard_o;
  const int32_t *type_o;
  const int32_t *kind_e;
  const int32_t *holders_e;
  const int32_t *allowed_e;
  const int32_t *first_site_i;
  const uint8_t *may_o;
  const uint8_t *is_shared_e;
  const uint8_t *in_node_e;
  const uint8_t *is_free_e;
  const uint8_t *allowed;
  const double *served_vp;
  const double *shared_vp;
  const double *sync_v;
  const double *bytes_vm;
  const double *weight_p;
  const int32_t *launches_vk;
  double *launch_kp;
  int32_t *option_i;
  int32_t *site;
  int32_t *won_o;
  double *load_pr;
  double *free_mr;
  int32_t *count_kr;
  double sync_ms;
  double sync_base_ms;
  double deadline_s;
  uint64_t seed;
} Task;

/* Episodes of the policy's game; see decode.c for the letters. */
typedef struct {
  int32_t num_episodes, num_items, num_ranks, num_levels, node_size, max_shards, option_hidden, option_last_width, place_hidden;
  const int32_t *order_i;
  const int32_t *first_option_i;
  const int32_t *first_shard_o;
  const int32_t *holders_e;
  const int32_t *allowed_e;
  const int32_t *first_site_i;
  const int32_t *witness_option_i;
  const int32_t *witness_site;
  const uint8_t *is_shared_e;
  const uint8_t *in_node_e;
  const uint8_t *allowed;
  const double *own_em;
  const double *all_e;
  const double *load_ep;
  const double *sync_e;
  const double *capacity_rm;
  const double *room_rm;
  const double *mean_p;
  const double *weight_p;
  const double *left_n;
  const float *option_ou;
  const float *option_state_nu;
  const float *option_context;
  const float *option_second;
  const float *option_second_bias;
  const float *option_last;
  const float *place_of_place;
  const float *place_state_nu;
  const float *place_context;
  const float *place_last;
  int32_t *option_ei;
  int32_t *site_ey;
  double unit_ms;
  uint64_t seed;
} Decode;
