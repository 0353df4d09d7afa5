/* Local search over sharding options, with what shards add to ranks taken as linear.

   A step's part counts at a p-norm over ranks (a mean of powers, so that even parts count as they are). Every item is held
   by one of its options; each of an option's shards has a site: a rank, a node, or all ranks. The search changes options
   and sites in place: items take their best option in turn (best response), slow ranks swap shards with others, and some
   items are taken off and held anew (ruin and recreate).

   Index names: i item, o option, e shard of an option, v kind of shard, r rank, p part of the step, k launch, m memory
   level. Arrays over ranks are padded to a multiple of LANES. No product is contracted and sums have a fixed order, so
   that all machines make the same plans. */

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "task.h"

enum { MAX_TYPES = 64, NONE = -1 };
/* Lanes, and what they hold, that are worked on in turn, so that no power waits for the one before it. */
enum { WIDE = 4, BLOCK = WIDE * LANES };
/* Ranks whose least load tells which of them need no look, in worlds of more than so many; whole blocks. */
enum { BIN = 2 * BLOCK, FEW_RANKS = 2 * BIN };
/* Exponents of the flattest and the sharpest norm, as powers of two. */
enum { FLAT = 3, SHARP = 7 };
/* Most rounds of swaps after a sweep, and most sweeps by each norm of the first descent. */
enum { SWAPS = 8, SWEEPS = 4 };
/* What counts as a gain, as a share of the step. */
static const double LEAST_GAIN = 1e-7;
/* What sums in another order may differ by, as a share. */
static const double ROUNDING = 1e-9;
/* What a power and the next differ by in rounding at the most, as a share of them, with room. */
static const double POWER_ROUNDING = 1e-12;
/* Chances that a round rebuilds for a launch, that it rebuilds all items of a type, and that the type of a few ruined
   items may not come back at once; and the largest share of the items that may be rebuilt without a launch. */
static const double LAUNCHES = 0.1, WHOLE_TYPE = 0.05, BARRED = 0.6, MOST_REBUILT = 0.67;

typedef double Lanes __attribute__((vector_size(LANES * sizeof(double))));

/* A shard of an item, and its rank. */
typedef struct {
  int32_t item, number, rank;
} Held;

typedef struct {
  Task *task;
  int32_t log2_exponent;
  uint64_t random;
  double *power_pr, *missing_kr, *score_r;
  /* Of each bin of ranks: the least load of a part and the largest power, what a shard adds there at least, and whether
     loads have changed since these were found. */
  double *least_pb, *most_power_pb, *bound_b;
  uint8_t *is_stale_b;
  int32_t num_bins;
  /* Of free shards, for swaps. */
  double *added_px, *load_px, *power_px;
  int32_t padded_held;
  double scale_p[PARTS], slope_p[PARTS], sum_p[PARTS], energy;
  /* Shares of the scale that the least and the mean loaded rank have of each part, and their powers. */
  double least_p[PADDED_PARTS], least_power_p[PADDED_PARTS], mean_p[PADDED_PARTS], mean_power_p[PADDED_PARTS];
  int32_t *absent_k, *absent;
  double *undo;
  int32_t *undo_rank, num_undo;
  int32_t *sites, *best_sites, *kept_sites, *order;
  Held *held;
} Search;

static double now_s(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* SplitMix64 (Steele, Lea and Flood, 2014). */
static uint64_t next_random(uint64_t *state) {
  uint64_t mixed = (*state += 0x9E3779B97F4A7C15ull);
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
  return mixed ^ (mixed >> 31);
}

static double uniform(uint64_t *state) { return (double)(next_random(state) >> 11) * 0x1.0p-53; }

static int32_t below(uint64_t *state, int32_t bound) { return (int32_t)(uniform(state) * bound); }

static double powered(double share, int32_t log2_exponent) {
  share = share > 0 ? share : 0;
  for (int32_t step = 0; step < log2_exponent; step++) share *= share;
  return share;
}

/* The same of one value for each part, at once. */
static void raise(double *share_p, int32_t log2_exponent) {
  for (int32_t step = 0; step < log2_exponent; step++)
    for (int32_t p = 0; p < PADDED_PARTS; p++) share_p[p] *= share_p[p];
}

static void take_roots(double *power_p, int32_t log2_exponent) {
  for (int32_t step = 0; step < log2_exponent; step++)
    for (int32_t p = 0; p < PADDED_PARTS; p++) power_p[p] = sqrt(power_p[p]);
}

static int32_t num_shards(const Task *task, int32_t option) {
  return task->first_shard_o[option + 1] - task->first_shard_o[option];
}

/* Norms. */

static void sum_powers(Search *search) {
  const Task *task = search->task;
  for (int32_t p = 0; p < PARTS; p++) {
    const Lanes *power = (const Lanes *)(search->power_pr + (size_t)p * task->padded_ranks);
    Lanes sum = {0};
    for (int32_t block = 0; block < task->padded_ranks / LANES; block++) sum += power[block];
    search->sum_p[p] = sum[0] + sum[1] + sum[2] + sum[3];
  }
}

static double energy_with(const Search *search, const double *added_p) {
  const Task *task = search->task;
  double energy = task->sync_ms + (task->num_synced > 0 ? task->sync_base_ms : 0), norm_p[PADDED_PARTS] = {0};
  for (int32_t p = 0; p < PARTS; p++) {
    double mean = (search->sum_p[p] + (added_p ? added_p[p] : 0)) / task->num_ranks;
    norm_p[p] = mean > 0 ? mean : 0;
  }
  take_roots(norm_p, search->log2_exponent);
  for (int32_t p = 0; p < PARTS; p++) energy += task->weight_p[p] * search->scale_p[p] * norm_p[p];
  return energy;
}

static double energy_ms(Search *search) {
  sum_powers(search);
  return energy_with(search, NULL);
}

/* The step by the slowest rank of each part. */
static double slowest_ms(const Task *task) {
  double step = task->sync_ms + (task->num_synced > 0 ? task->sync_base_ms : 0);
  for (int32_t p = 0; p < PARTS; p++) {
    double most = 0;
    for (int32_t r = 0; r < task->num_ranks; r++) most = fmax(most, task->load_pr[(size_t)p * task->padded_ranks + r]);
    step += task->weight_p[p] * most;
  }
  return step;
}

/* What one more unit in a part's sum of powers is worth, and the energy. */
static void set_slopes(Search *search) {
  const Task *task = search->task;
  double norm_p[PADDED_PARTS] = {0}, exponent = (double)(1 << search->log2_exponent);
  sum_powers(search);
  for (int32_t p = 0; p < PARTS; p++) norm_p[p] = search->sum_p[p] / task->num_ranks;
  take_roots(norm_p, search->log2_exponent);
  search->energy = task->sync_ms + (task->num_synced > 0 ? task->sync_base_ms : 0);
  for (int32_t p = 0; p < PARTS; p++) {
    double norm = search->scale_p[p] * norm_p[p];
    search->energy += task->weight_p[p] * norm;
    search->slope_p[p] = search->sum_p[p] > 1e-300 ? task->weight_p[p] * norm / (exponent * search->sum_p[p]) : 0;
  }
}

static void set_exponent(Search *search, int32_t log2_exponent) {
  Task *task = search->task;
  search->log2_exponent = log2_exponent;
  for (int32_t p = 0; p < PARTS; p++) {
    const double *load_r = task->load_pr + (size_t)p * task->padded_ranks;
    double *power_r = search->power_pr + (size_t)p * task->padded_ranks, most = 1e-30;
    for (int32_t r = 0; r < task->num_ranks; r++) most = fmax(most, load_r[r]);
    search->scale_p[p] = most;
    for (int32_t r = 0; r < task->padded_ranks; r++)
      power_r[r] = r < task->num_ranks ? powered(load_r[r] / most, log2_exponent) : 0;
  }
  memset(search->is_stale_b, 1, search->num_bins);
}

/* Shards on ranks. */

static const double *rates_of(const Task *task, int32_t shard) {
  return (task->is_shared_e[shard] ? task->shared_vp : task->served_vp) + (size_t)task->kind_e[shard] * PARTS;
}

/* What a shard adds to the parts of a rank, with the launches of kernels that the rank has not yet. */
static void load_on(const Search *search, int32_t shard, int32_t rank, double *load_p) {
  const Task *task = search->task;
  const int32_t *launches_k = task->launches_vk + (size_t)task->kind_e[shard] * task->num_launches;
  memcpy(load_p, rates_of(task, shard), PARTS * sizeof(double));
  for (int32_t k = 0; k < task->num_launches; k++)
    if (launches_k[k] && task->count_kr[(size_t)k * task->padded_ranks + rank] == 0)
      for (int32_t p = 0; p < PARTS; p++) load_p[p] += task->launch_kp[k * PARTS + p];
}

static void count_launches(Search *search, int32_t shard, int32_t rank, int32_t sign) {
  Task *task = search->task;
  const int32_t *launches_k = task->launches_vk + (size_t)task->kind_e[shard] * task->num_launches;
  for (int32_t k = 0; k < task->num_launches; k++) {
    if (!launches_k[k]) continue;
    size_t at = (size_t)k * task->padded_ranks + rank;
    search->absent_k[k] -= task->count_kr[at] == 0;
    task->count_kr[at] += sign * launches_k[k];
    search->missing_kr[at] = task->count_kr[at] == 0 ? 1.0 : 0.0;
    search->absent_k[k] += task->count_kr[at] == 0;
  }
}

static void add_to_rank(Search *search, int32_t shard, int32_t rank, int32_t sign) {
  Task *task = search->task;
  double load_p[PARTS];
  if (sign < 0) count_launches(search, shard, rank, sign);
  load_on(search, shard, rank, load_p);
  if (sign > 0) count_launches(search, shard, rank, sign);
  double power_p[PADDED_PARTS] = {0};
  for (int32_t p = 0; p < PARTS; p++) {
    double load = task->load_pr[(size_t)p * task->padded_ranks + rank] += sign * load_p[p];
    power_p[p] = load > 0 ? load / search->scale_p[p] : 0;
  }
  raise(power_p, search->log2_exponent);
  for (int32_t p = 0; p < PARTS; p++) search->power_pr[(size_t)p * task->padded_ranks + rank] = power_p[p];
  search->is_stale_b[rank / BIN] = 1;
  const double *bytes_m = task->bytes_vm + (size_t)task->kind_e[shard] * task->num_levels;
  for (int32_t m = 0; m < task->num_levels; m++) task->free_mr[(size_t)m * task->padded_ranks + rank] -= sign * bytes_m[m];
}

static void count_launches_of_all(Search *search, int32_t shard, int32_t sign) {
  Task *task = search->task;
  const int32_t *launches_k = task->launches_vk + (size_t)task->kind_e[shard] * task->num_launches;
  for (int32_t k = 0; k < task->num_launches; k++) {
    if (!launches_k[k]) continue;
    int32_t *count_r = task->count_kr + (size_t)k * task->padded_ranks, absent = 0;
    double *missing_r = search->missing_kr + (size_t)k * task->padded_ranks;
    for (int32_t r = 0; r < task->num_ranks; r++) {
      count_r[r] += sign * launches_k[k];
      absent += count_r[r] == 0;
      missing_r[r] = count_r[r] == 0 ? 1.0 : 0.0;
    }
    search->absent_k[k] = absent;
  }
}

/* As `add_to_rank`, of a shard that all ranks hold: part by part, ranks in blocks. */
static void add_to_all(Search *search, int32_t shard, int32_t sign) {
  Task *task = search->task;
  const int32_t *launches_k = task->launches_vk + (size_t)task->kind_e[shard] * task->num_launches;
  if (sign < 0) count_launches_of_all(search, shard, sign);
  for (int32_t p = 0; p < PARTS; p++) {
    double *load_r = task->load_pr + (size_t)p * task->padded_ranks, rate = rates_of(task, shard)[p];
    double *power_r = search->power_pr + (size_t)p * task->padded_ranks, scale = search->scale_p[p];
    for (int32_t first = 0; first < task->num_ranks; first += BLOCK) {
      int32_t count = task->num_ranks - first < BLOCK ? task->num_ranks - first : BLOCK;
      double added[BLOCK], share[BLOCK];
      for (int32_t at = 0; at < count; at++) added[at] = rate;
      for (int32_t k = 0; k < task->num_launches; k++) {
        if (!launches_k[k]) continue;
        const double *missing = search->missing_kr + (size_t)k * task->padded_ranks + first;
        for (int32_t at = 0; at < count; at++) added[at] += missing[at] * task->launch_kp[k * PARTS + p];
      }
      for (int32_t at = 0; at < count; at++) {
        double load = load_r[first + at] += sign * added[at];
        share[at] = load > 0 ? load / scale : 0;
      }
      for (int32_t step = 0; step < search->log2_exponent; step++)
        for (int32_t at = 0; at < count; at++) share[at] *= share[at];
      for (int32_t at = 0; at < count; at++) power_r[first + at] = share[at];
    }
  }
  if (sign > 0) count_launches_of_all(search, shard, sign);
  const double *bytes_m = task->bytes_vm + (size_t)task->kind_e[shard] * task->num_levels;
  for (int32_t m = 0; m < task->num_levels; m++)
    for (int32_t r = 0; r < task->num_ranks; r++) task->free_mr[(size_t)m * task->padded_ranks + r] -= sign * bytes_m[m];
  memset(search->is_stale_b, 1, search->num_bins);
}

static int32_t first_rank(const Task *task, int32_t shard, int32_t site) {
  return task->is_shared_e[shard] ? 0 : site * task->holders_e[shard];
}

static int32_t num_holders(const Task *task, int32_t shard) {
  return task->is_shared_e[shard] ? task->num_ranks : task->holders_e[shard];
}

static void count_sync(Task *task, int32_t shard, int32_t sign) {
  double sync_ms = task->sync_v[task->kind_e[shard]];
  if (!task->is_shared_e[shard] || sync_ms <= 0) return;
  task->sync_ms += sign * sync_ms;
  task->num_synced += sign;
}

static void add_shard(Search *search, int32_t shard, int32_t site, int32_t sign) {
  Task *task = search->task;
  int32_t first = first_rank(task, shard, site), count = num_holders(task, shard);
  if (task->is_shared_e[shard]) add_to_all(search, shard, sign);
  else
    for (int32_t rank = first; rank < first + count; rank++) add_to_rank(search, shard, rank, sign);
  count_sync(task, shard, sign);
}

static void add_option(Search *search, int32_t option, const int32_t *sites, int32_t sign) {
  int32_t first = search->task->first_shard_o[option];
  for (int32_t number = 0; number < num_shards(search->task, option); number++)
    add_shard(search, first + number, sites[number], sign);
}

static int32_t fits_on(const Task *task, int32_t shard, int32_t first, int32_t count) {
  const double *bytes_m = task->bytes_vm + (size_t)task->kind_e[shard] * task->num_levels;
  for (int32_t m = 0; m < task->num_levels; m++)
    for (int32_t rank = first; rank < first + count; rank++)
      if (task->free_mr[(size_t)m * task->padded_ranks + rank] < bytes_m[m]) return 0;
  return 1;
}

/* Adds a shard so that it can be taken back bit by bit. */
static void try_shard(Search *search, int32_t shard, int32_t site) {
  Task *task = search->task;
  int32_t first = first_rank(task, shard, site), count = num_holders(task, shard);
  for (int32_t rank = first; rank < first + count; rank++) {
    double *undo = search->undo + (size_t)search->num_undo * 2 * PARTS;
    search->undo_rank[search->num_undo++] = rank;
    for (int32_t p = 0; p < PARTS; p++) {
      undo[p] = task->load_pr[(size_t)p * task->padded_ranks + rank];
      undo[PARTS + p] = search->power_pr[(size_t)p * task->padded_ranks + rank];
    }
  }
  add_shard(search, shard, site, 1);
}

static void take_back(Search *search, int32_t option, int32_t count) {
  Task *task = search->task;
  for (int32_t number = count - 1; number >= 0; number--) {
    int32_t shard = task->first_shard_o[option] + number, first = first_rank(task, shard, search->sites[number]);
    const double *bytes_m = task->bytes_vm + (size_t)task->kind_e[shard] * task->num_levels;
    for (int32_t rank = first; rank < first + num_holders(task, shard); rank++) {
      count_launches(search, shard, rank, -1);
      for (int32_t m = 0; m < task->num_levels; m++) task->free_mr[(size_t)m * task->padded_ranks + rank] += bytes_m[m];
    }
    count_sync(task, shard, -1);
  }
  while (search->num_undo) {
    const double *undo = search->undo + (size_t)--search->num_undo * 2 * PARTS;
    for (int32_t p = 0; p < PARTS; p++) {
      size_t at = (size_t)p * task->padded_ranks + search->undo_rank[search->num_undo];
      task->load_pr[at] = undo[p];
      search->power_pr[at] = undo[PARTS + p];
    }
    search->is_stale_b[search->undo_rank[search->num_undo] / BIN] = 1;
  }
}

/* Best sites. */

/* The launches of a shard that some rank has not yet. */
static int32_t find_absent(const Search *search, int32_t shard) {
  const Task *task = search->task;
  const int32_t *launches_k = task->launches_vk + (size_t)task->kind_e[shard] * task->num_launches;
  int32_t count = 0;
  for (int32_t k = 0; k < task->num_launches; k++)
    if (launches_k[k] && search->absent_k[k]) search->absent[count++] = k;
  return count;
}

/* What a shard would add to a part on some blocks of ranks, as many as are worked on at once. */
static inline void score_blocks(
    const Search *search, int32_t p, double rate, int32_t block, int32_t num_absent, int32_t count) {
  const Task *task = search->task;
  const Lanes *load = (const Lanes *)(task->load_pr + (size_t)p * task->padded_ranks) + block;
  const Lanes *power = (const Lanes *)(search->power_pr + (size_t)p * task->padded_ranks) + block;
  Lanes *score = (Lanes *)search->score_r + block, after[WIDE];
  double inverse = 1 / search->scale_p[p], slope = search->slope_p[p];
  for (int32_t at = 0; at < count; at++) after[at] = load[at] + rate;
  for (int32_t number = 0; number < num_absent; number++) {
    int32_t k = search->absent[number];
    const Lanes *missing = (const Lanes *)(search->missing_kr + (size_t)k * task->padded_ranks) + block;
    for (int32_t at = 0; at < count; at++) after[at] += missing[at] * task->launch_kp[k * PARTS + p];
  }
  for (int32_t at = 0; at < count; at++) after[at] *= inverse;
  for (int32_t step = 0; step < search->log2_exponent; step++)
    for (int32_t at = 0; at < count; at++) after[at] *= after[at];
  for (int32_t at = 0; at < count; at++) score[at] += slope * (after[at] - power[at]);
}

/* What a shard would add on each rank, by slopes. */
static void score_ranks(Search *search, int32_t shard) {
  const Task *task = search->task;
  const double *rate_p = rates_of(task, shard);
  int32_t num_blocks = task->padded_ranks / LANES, num_absent = find_absent(search, shard);
  memset(search->score_r, 0, task->padded_ranks * sizeof(double));
  for (int32_t p = 0; p < PARTS; p++) {
    int32_t block = 0;
    for (; block + WIDE <= num_blocks; block += WIDE) score_blocks(search, p, rate_p[p], block, num_absent, WIDE);
    for (; block + 2 <= num_blocks; block += 2) score_blocks(search, p, rate_p[p], block, num_absent, 2);
    for (; block < num_blocks; block++) score_blocks(search, p, rate_p[p], block, num_absent, 1);
  }
}

static void look_at_bin(Search *search, int32_t bin) {
  const Task *task = search->task;
  int32_t first = bin * BIN, count = task->num_ranks - first < BIN ? task->num_ranks - first : BIN;
  for (int32_t p = 0; p < PARTS; p++) {
    const double *load = task->load_pr + (size_t)p * task->padded_ranks + first;
    const double *power = search->power_pr + (size_t)p * task->padded_ranks + first;
    double least = load[0], most = power[0];
    for (int32_t at = 1; at < count; at++) {
      least = load[at] < least ? load[at] : least;
      most = power[at] > most ? power[at] : most;
    }
    search->least_pb[(size_t)p * search->num_bins + bin] = least;
    search->most_power_pb[(size_t)p * search->num_bins + bin] = most;
  }
  search->is_stale_b[bin] = 0;
}

/* What a shard adds at least to a rank of each of some bins: as to one with the bin's least load of each part, since powers
   grow more the more a rank has. Launches are left out, and 0 returned where these may take time off. */
static int32_t bound_bins(Search *search, int32_t shard, int32_t num_absent, int32_t first, int32_t last) {
  const Task *task = search->task;
  const double *rate_p = rates_of(task, shard);
  for (int32_t number = 0; number < num_absent; number++)
    for (int32_t p = 0; p < PARTS; p++)
      if (task->launch_kp[search->absent[number] * PARTS + p] < 0) return 0;
  for (int32_t bin = first; bin <= last; bin++) {
    if (search->is_stale_b[bin]) look_at_bin(search, bin);
    search->bound_b[bin] = 0;
  }
  for (int32_t p = 0; p < PARTS; p++) {
    const double *least_b = search->least_pb + (size_t)p * search->num_bins;
    const double *most_b = search->most_power_pb + (size_t)p * search->num_bins;
    double inverse = 1 / search->scale_p[p], slope = search->slope_p[p], rate = rate_p[p];
    for (int32_t bin = first; bin <= last; bin++) {
      double before = least_b[bin] * inverse, after = (least_b[bin] + rate) * inverse;
      for (int32_t step = 0; step < search->log2_exponent; step++) {
        before *= before;
        after *= after;
      }
      search->bound_b[bin] += slope * (after - before - POWER_ROUNDING * (after + most_b[bin]));
    }
  }
  return 1;
}

/* As `best_site`, of a shard on a single rank: bins are looked at from the least bound on, until no other can have a rank
   where it adds as little. */
static int32_t best_rank(Search *search, int32_t shard, int32_t node, const uint8_t *allowed) {
  const Task *task = search->task;
  const double *rate_p = rates_of(task, shard);
  int32_t from = node < 0 ? 0 : node * task->node_size, to = node < 0 ? task->num_ranks : from + task->node_size;
  int32_t first = from / BIN, last = (to - 1) / BIN, num_absent = find_absent(search, shard), best = -1;
  int32_t is_bounded = bound_bins(search, shard, num_absent, first, last), num_blocks = task->padded_ranks / LANES;
  double least = INFINITY;
  for (int32_t next = first; next <= last; next++) {
    int32_t bin = next;
    if (is_bounded) {
      for (int32_t other = first; other <= last; other++)
        if (search->bound_b[other] < search->bound_b[bin]) bin = other;
      if (search->bound_b[bin] > least) break;
      search->bound_b[bin] = INFINITY;
    }
    int32_t block = bin * BIN / LANES, end = block + BIN / LANES < num_blocks ? block + BIN / LANES : num_blocks;
    memset(search->score_r + bin * BIN, 0, (end - block) * sizeof(Lanes));
    for (int32_t p = 0; p < PARTS; p++) {
      int32_t at = block;
      for (; at + WIDE <= end; at += WIDE) score_blocks(search, p, rate_p[p], at, num_absent, WIDE);
      for (; at < end; at++) score_blocks(search, p, rate_p[p], at, num_absent, 1);
    }
    for (int32_t rank = bin * BIN < from ? from : bin * BIN; rank < to && rank < (bin + 1) * BIN; rank++) {
      double score = search->score_r[rank];
      if (score > least || (score == least && best >= 0 && rank > best)) continue;
      if ((allowed && !allowed[rank]) || !fits_on(task, shard, rank, 1)) continue;
      least = score;
      best = rank;
    }
  }
  return best;
}

/* The open site where a shard adds least; -1 where none is open. */
static int32_t best_site(Search *search, int32_t shard, int32_t node) {
  const Task *task = search->task;
  int32_t holders = num_holders(task, shard), best = -1;
  if (task->is_shared_e[shard]) return fits_on(task, shard, 0, task->num_ranks) ? 0 : -1;
  const uint8_t *allowed = task->allowed_e[shard] < 0 ? NULL : task->allowed + (size_t)task->allowed_e[shard] * task->num_ranks;
  if (holders == 1 && task->num_ranks > FEW_RANKS) return best_rank(search, shard, node, allowed);
  double least = INFINITY;
  score_ranks(search, shard);
  for (int32_t site = 0; site < task->num_ranks / holders; site++) {
    int32_t first = site * holders;
    if (node >= 0 && first / task->node_size != node) continue;
    if (allowed && !allowed[site]) continue;
    double score = 0;
    for (int32_t rank = first; rank < first + holders; rank++) score += search->score_r[rank];
    if (score < least && fits_on(task, shard, first, holders)) {
      least = score;
      best = site;
    }
  }
  return best;
}

/* Adds to sums, by lanes, what a shard would add to a part's powers on some ranks, as many as are worked on at once. */
static inline void sum_added(
    const Search *search, int32_t p, double rate, int32_t first, int32_t num_absent, int32_t count, double *sums) {
  const Task *task = search->task;
  const double *load = task->load_pr + (size_t)p * task->padded_ranks + first;
  const double *power = search->power_pr + (size_t)p * task->padded_ranks + first;
  double inverse = 1 / search->scale_p[p], after[WIDE * LANES];
  for (int32_t at = 0; at < count; at++) after[at] = load[at] + rate;
  for (int32_t number = 0; number < num_absent; number++) {
    int32_t k = search->absent[number];
    const double *missing = search->missing_kr + (size_t)k * task->padded_ranks + first;
    for (int32_t at = 0; at < count; at++) after[at] += missing[at] * task->launch_kp[k * PARTS + p];
  }
  for (int32_t at = 0; at < count; at++) after[at] *= inverse;
  for (int32_t at = 0; at < count; at++) after[at] = after[at] > 0 ? after[at] : 0;
  for (int32_t step = 0; step < search->log2_exponent; step++)
    for (int32_t at = 0; at < count; at++) after[at] *= after[at];
  for (int32_t at = 0; at < count; at++) sums[at % LANES] += after[at] - power[at];
}

/* What a shard would add to the sums of powers at a site. */
static void added_powers(const Search *search, int32_t shard, int32_t site, double *added_p) {
  const Task *task = search->task;
  int32_t first = first_rank(task, shard, site), count = num_holders(task, shard);
  if (count == 1) {
    double after_p[PADDED_PARTS] = {0};
    load_on(search, shard, first, after_p);
    for (int32_t p = 0; p < PARTS; p++) {
      double after = (task->load_pr[(size_t)p * task->padded_ranks + first] + after_p[p]) * (1 / search->scale_p[p]);
      after_p[p] = after > 0 ? after : 0;
    }
    raise(after_p, search->log2_exponent);
    for (int32_t p = 0; p < PARTS; p++) added_p[p] = after_p[p] - search->power_pr[(size_t)p * task->padded_ranks + first];
    return;
  }
  const double *rate_p = rates_of(task, shard);
  int32_t num_absent = find_absent(search, shard), num_whole = count / LANES;
  for (int32_t p = 0; p < PARTS; p++) {
    double sums[LANES] = {0};
    int32_t block = 0;
    for (; block + WIDE <= num_whole; block += WIDE)
      sum_added(search, p, rate_p[p], first + block * LANES, num_absent, WIDE * LANES, sums);
    for (; block < num_whole; block++) sum_added(search, p, rate_p[p], first + block * LANES, num_absent, LANES, sums);
    for (int32_t at = num_whole * LANES; at < count; at++)
      sum_added(search, p, rate_p[p], first + at, num_absent, 1, sums + at % LANES);
    added_p[p] = sums[0] + sums[1] + sums[2] + sums[3];
  }
}

/* Finds the least and the mean loads, for `least_energy`; lane by lane, which does not wait for the sum before. */
static void set_least_loads(Search *search) {
  const Task *task = search->task;
  int32_t num_whole = task->num_ranks / BLOCK * BLOCK;
  for (int32_t p = 0; p < PARTS; p++) {
    const double *load_r = task->load_pr + (size_t)p * task->padded_ranks;
    double least_l[BLOCK], sum_l[BLOCK], least = INFINITY, sum = 0;
    for (int32_t lane = 0; lane < BLOCK; lane++) {
      least_l[lane] = INFINITY;
      sum_l[lane] = 0;
    }
    for (int32_t r = 0; r < num_whole; r += BLOCK)
      for (int32_t lane = 0; lane < BLOCK; lane++) {
        least_l[lane] = load_r[r + lane] < least_l[lane] ? load_r[r + lane] : least_l[lane];
        sum_l[lane] += load_r[r + lane];
      }
    for (int32_t lane = 0; lane < BLOCK; lane++) {
      least = least_l[lane] < least ? least_l[lane] : least;
      sum += sum_l[lane];
    }
    for (int32_t r = num_whole; r < task->num_ranks; r++) {
      least = load_r[r] < least ? load_r[r] : least;
      sum += load_r[r];
    }
    double mean = sum / task->num_ranks;
    search->least_p[p] = search->least_power_p[p] = least > 0 ? least / search->scale_p[p] : 0;
    search->mean_p[p] = search->mean_power_p[p] = mean > 0 ? mean / search->scale_p[p] : 0;
  }
  raise(search->least_power_p, search->log2_exponent);
  raise(search->mean_power_p, search->log2_exponent);
}

/* What the energy is at least with an option, wherever its shards are: powers grow more the more a rank has, so that
   each shard adds at least what it adds to the least loaded rank of each part, and to all ranks what it adds to as many
   of the mean load. Launches are left out. */
static double least_energy(const Search *search, int32_t option) {
  const Task *task = search->task;
  double added_p[PADDED_PARTS] = {0}, sync_ms = 0;
  int32_t num_synced = 0;
  for (int32_t shard = task->first_shard_o[option]; shard < task->first_shard_o[option + 1]; shard++) {
    const double *rate_p = rates_of(task, shard);
    int32_t is_shared = task->is_shared_e[shard];
    const double *share_p = is_shared ? search->mean_p : search->least_p;
    const double *before_p = is_shared ? search->mean_power_p : search->least_power_p;
    double after_p[PADDED_PARTS] = {0}, holders = num_holders(task, shard);
    for (int32_t p = 0; p < PARTS; p++) after_p[p] = share_p[p] + rate_p[p] / search->scale_p[p];
    raise(after_p, search->log2_exponent);
    for (int32_t p = 0; p < PARTS; p++) added_p[p] += holders * (after_p[p] - before_p[p]);
    if (is_shared && task->sync_v[task->kind_e[shard]] > 0) {
      sync_ms += task->sync_v[task->kind_e[shard]];
      num_synced++;
    }
  }
  double energy = energy_with(search, added_p) + sync_ms;
  return task->num_synced == 0 && num_synced ? energy + task->sync_base_ms : energy;
}

/* The energy with an option at its cheapest sites, which are left in `sites`; infinite where it finds no room, and where
   its first shards alone come to the most that it may be. */
static double option_energy(Search *search, int32_t option, double most) {
  Task *task = search->task;
  int32_t first = task->first_shard_o[option], count = num_shards(task, option), node = -1, number;
  double energy = INFINITY, added_p[PARTS];
  search->num_undo = 0;
  for (number = 0; number < count; number++) {
    if (number) {
      set_slopes(search);
      if (search->energy >= most) break;
    }
    int32_t shard = first + number, site = best_site(search, shard, node);
    if (site < 0) break;
    search->sites[number] = site;
    if (task->in_node_e[shard]) node = site * task->holders_e[shard] / task->node_size;
    if (number + 1 < count) {
      try_shard(search, shard, site);
      continue;
    }
    added_powers(search, shard, site, added_p);
    count_sync(task, shard, 1);
    energy = energy_with(search, added_p);
    count_sync(task, shard, -1);
  }
  if (number && count > 1) {
    take_back(search, option, number < count ? number : count - 1);
    set_slopes(search);
  }
  return energy;
}

static int32_t uses(const Task *task, int32_t option, int32_t launch) {
  for (int32_t shard = task->first_shard_o[option]; shard < task->first_shard_o[option + 1]; shard++)
    if (task->launches_vk[(size_t)task->kind_e[shard] * task->num_launches + launch]) return 1;
  return 0;
}

/* Holds an item that is held by nobody by its best option but those of a type or a launch; the energy then, infinite if none fits. */
static double hold_best(Search *search, int32_t item, int32_t barred_type, int32_t barred_launch) {
  Task *task = search->task;
  double least = INFINITY;
  int32_t best = -1;
  set_slopes(search);
  set_least_loads(search);
  for (int32_t option = task->first_option_i[item]; option < task->first_option_i[item + 1]; option++) {
    if (!task->may_o[option] || task->type_o[option] == barred_type) continue;
    if (barred_launch >= 0 && uses(task, option, barred_launch)) continue;
    if (least_energy(search, option) * (1 - ROUNDING) >= least) continue;
    double energy = option_energy(search, option, least);
    if (energy < least) {
      least = energy;
      best = option;
      memcpy(search->best_sites, search->sites, num_shards(task, option) * sizeof(int32_t));
    }
  }
  if (best < 0) return INFINITY;
  task->won_o[best]++;
  task->option_i[item] = best;
  memcpy(task->site + task->first_site_i[item], search->best_sites, num_shards(task, best) * sizeof(int32_t));
  add_option(search, best, search->best_sites, 1);
  return least;
}

/* Gives an item its best option if that shortens the step. */
static int32_t respond(Search *search, int32_t item) {
  Task *task = search->task;
  int32_t option = task->option_i[item], *sites = task->site + task->first_site_i[item];
  size_t size = num_shards(task, option) * sizeof(int32_t);
  memcpy(search->kept_sites, sites, size);
  double before = energy_ms(search);
  add_option(search, option, sites, -1);
  double after = hold_best(search, item, NONE, NONE);
  if (after < before * (1 - LEAST_GAIN)) return 1;
  if (after < INFINITY) add_option(search, task->option_i[item], sites, -1);
  task->option_i[item] = option;
  memcpy(sites, search->kept_sites, size);
  add_option(search, option, sites, 1);
  return 0;
}

/* Swaps. */

static int32_t free_shards(const Task *task, Held *found) {
  int32_t count = 0;
  for (int32_t item = 0; item < task->num_items; item++) {
    int32_t first = task->first_shard_o[task->option_i[item]];
    for (int32_t number = 0; number < num_shards(task, task->option_i[item]); number++)
      if (task->is_free_e[first + number])
        found[count++] = (Held){item, number, task->site[task->first_site_i[item] + number]};
  }
  return count;
}

static int32_t shard_of(const Task *task, Held held) { return task->first_shard_o[task->option_i[held.item]] + held.number; }

static int32_t may_swap(const Task *task, int32_t given, int32_t taken, int32_t from, int32_t to) {
  const double *given_m = task->bytes_vm + (size_t)task->kind_e[given] * task->num_levels;
  const double *taken_m = task->bytes_vm + (size_t)task->kind_e[taken] * task->num_levels;
  for (int32_t m = 0; m < task->num_levels; m++) {
    const double *free_r = task->free_mr + (size_t)m * task->padded_ranks;
    double more = given_m[m] - taken_m[m];
    if (free_r[to] < more || free_r[from] < -more) return 0;
  }
  return 1;
}

/* Lines up what free shards add, and their ranks' loads and powers, to be worked on in blocks. */
static void line_up(Search *search, int32_t count) {
  const Task *task = search->task;
  for (int32_t at = 0; at < count; at++) {
    const double *rate_p = rates_of(task, shard_of(task, search->held[at]));
    for (int32_t p = 0; p < PARTS; p++) {
      size_t rank = (size_t)p * task->padded_ranks + search->held[at].rank, to = (size_t)p * search->padded_held + at;
      search->added_px[to] = rate_p[p];
      search->load_px[to] = task->load_pr[rank];
      search->power_px[to] = search->power_pr[rank];
    }
  }
}

/* What swaps of a shard of a rank against a block of free shards would add, by slopes. */
static void score_swaps(const Search *search, const double *given_p, int32_t from, int32_t block, double *score) {
  const Task *task = search->task;
  for (int32_t lane = 0; lane < BLOCK; lane++) score[lane] = 0;
  for (int32_t p = 0; p < PARTS; p++) {
    size_t at = (size_t)p * search->padded_held + (size_t)block * BLOCK, rank = (size_t)p * task->padded_ranks + from;
    const double *added = search->added_px + at, *load = search->load_px + at, *power = search->power_px + at;
    double load_from = task->load_pr[rank], power_from = search->power_pr[rank], here[BLOCK], there[BLOCK];
    double inverse = 1 / search->scale_p[p], slope = search->slope_p[p];
    for (int32_t lane = 0; lane < BLOCK; lane++) {
      double more = given_p[p] - added[lane];
      here[lane] = (load_from - more) * inverse;
      there[lane] = (load[lane] + more) * inverse;
      here[lane] = here[lane] > 0 ? here[lane] : 0;
      there[lane] = there[lane] > 0 ? there[lane] : 0;
    }
    for (int32_t step = 0; step < search->log2_exponent; step++)
      for (int32_t lane = 0; lane < BLOCK; lane++) {
        here[lane] *= here[lane];
        there[lane] *= there[lane];
      }
    for (int32_t lane = 0; lane < BLOCK; lane++) score[lane] += slope * (here[lane] - power_from + (there[lane] - power[lane]));
  }
}

static void swap(Search *search, Held one, Held other) {
  Task *task = search->task;
  int32_t given = shard_of(task, one), taken = shard_of(task, other);
  add_shard(search, given, one.rank, -1);
  add_shard(search, taken, other.rank, -1);
  add_shard(search, given, other.rank, 1);
  add_shard(search, taken, one.rank, 1);
  task->site[task->first_site_i[one.item] + one.number] = other.rank;
  task->site[task->first_site_i[other.item] + other.number] = one.rank;
}

/* The swap of a rank's shard against another's that seems to gain most, if it does. */
static int32_t swap_from(Search *search, int32_t slow) {
  Task *task = search->task;
  Held *held = search->held;
  double before = energy_ms(search), least = 0;
  int32_t count = free_shards(task, held);
  Held given = {-1, 0, 0}, taken = {-1, 0, 0};
  set_slopes(search);
  line_up(search, count);
  for (int32_t one = 0; one < count; one++) {
    if (held[one].rank != slow) continue;
    int32_t mine = shard_of(task, held[one]);
    for (int32_t block = 0; block * BLOCK < count; block++) {
      double score[BLOCK];
      score_swaps(search, rates_of(task, mine), slow, block, score);
      for (int32_t other = block * BLOCK; other < count && other < (block + 1) * BLOCK; other++) {
        if (!(score[other % BLOCK] < least) || held[other].rank == slow || held[other].item == held[one].item) continue;
        if (!may_swap(task, mine, shard_of(task, held[other]), slow, held[other].rank)) continue;
        least = score[other % BLOCK];
        given = held[one];
        taken = held[other];
      }
    }
  }
  if (given.item < 0) return 0;
  swap(search, given, taken);
  if (energy_ms(search) < before * (1 - LEAST_GAIN)) return 1;
  swap(search, (Held){given.item, given.number, taken.rank}, (Held){taken.item, taken.number, given.rank});
  return 0;
}

static int32_t slowest_rank(const Task *task, int32_t part) {
  const double *load_r = task->load_pr + (size_t)part * task->padded_ranks;
  int32_t slowest = 0;
  for (int32_t rank = 1; rank < task->num_ranks; rank++)
    if (load_r[rank] > load_r[slowest]) slowest = rank;
  return slowest;
}

static int32_t is_over(const Search *search) { return now_s() >= search->task->deadline_s; }

/* Swaps with the slowest rank of each part, as long as they help; ranks without any are not tried again before the next. */
static int32_t swap_slowest(Search *search) {
  Task *task = search->task;
  int32_t num_swaps = 0, num_idle = 0, idle[PARTS];
  for (int32_t round = 0, before = -1; round < SWAPS && before < num_swaps; round++) {
    before = num_swaps;
    for (int32_t p = 0; p < PARTS; p++) {
      if (task->weight_p[p] <= 0) continue;
      if (is_over(search)) return num_swaps;
      int32_t slowest = slowest_rank(task, p), at = 0;
      while (at < num_idle && idle[at] != slowest) at++;
      if (at < num_idle) continue;
      if (swap_from(search, slowest)) {
        num_swaps++;
        num_idle = 0;
      } else if (num_idle < PARTS) idle[num_idle++] = slowest;
    }
  }
  return num_swaps;
}

/* Descent, ruin and recreate. */

static void shuffle(int32_t *order, int32_t count, uint64_t *random) {
  for (int32_t last = count - 1; last > 0; last--) {
    int32_t other = below(random, last + 1), kept = order[last];
    order[last] = order[other];
    order[other] = kept;
  }
}

/* Best responses of some items, then swaps, by sharper and sharper norms. */
static void descend(Search *search, const int32_t *items, int32_t count, int32_t sweeps) {
  for (int32_t log2_exponent = FLAT; log2_exponent <= SHARP; log2_exponent += 2) {
    set_exponent(search, log2_exponent);
    for (int32_t sweep = 0; sweep < sweeps; sweep++) {
      int32_t num_changes = 0;
      for (int32_t at = 0; at < count; at++) {
        if (is_over(search)) return;
        num_changes += respond(search, items[at]);
      }
      num_changes += swap_slowest(search);
      if (!num_changes) break;
    }
  }
}

static int32_t is_on_any(const Task *task, int32_t item, const int32_t *ranks, int32_t count) {
  int32_t option = task->option_i[item];
  for (int32_t number = 0; number < num_shards(task, option); number++) {
    int32_t shard = task->first_shard_o[option] + number;
    if (task->is_shared_e[shard]) continue;
    int32_t first = first_rank(task, shard, task->site[task->first_site_i[item] + number]);
    for (int32_t at = 0; at < count; at++)
      if (first <= ranks[at] && ranks[at] < first + task->holders_e[shard]) return 1;
  }
  return 0;
}

/* Best responses of the items on the slowest ranks, as long as that helps. */
static void relieve(Search *search) {
  Task *task = search->task;
  int32_t num_changes = 1;
  set_exponent(search, SHARP);
  while (num_changes) {
    num_changes = 0;
    for (int32_t p = 0; p < PARTS; p++) {
      int32_t slowest = slowest_rank(task, p);
      for (int32_t item = 0; item < task->num_items; item++) {
        if (!is_on_any(task, item, &slowest, 1)) continue;
        if (is_over(search)) return;
        num_changes += respond(search, item);
      }
    }
  }
}

/* Brings items to the front of the order. */
static int32_t bring(int32_t *order, int32_t count, int32_t at) {
  int32_t item = order[at];
  order[at] = order[count];
  order[count] = item;
  return count + 1;
}

/* A sharding type that is in use: each as likely, or by how many items it holds. */
static int32_t some_type(const Task *task, uint64_t *random) {
  int32_t types[MAX_TYPES], count = 0, item = below(random, task->num_items);
  if (uniform(random) < 0.5) return task->type_o[task->option_i[item]];
  for (item = 0; item < task->num_items; item++) {
    int32_t type = task->type_o[task->option_i[item]], at = 0;
    while (at < count && types[at] != type) at++;
    if (at == count && count < MAX_TYPES) types[count++] = type;
  }
  return types[below(random, count)];
}

/* Takes items off that come first in the order, and holds them anew; 0 if one finds no room. */
static int32_t recreate(Search *search, int32_t count, int32_t barred_type, int32_t barred_launch) {
  Task *task = search->task;
  const int32_t *items = search->order;
  for (int32_t at = 0; at < count; at++)
    add_option(search, task->option_i[items[at]], task->site + task->first_site_i[items[at]], -1);
  for (int32_t at = 0; at < count; at++) {
    if (hold_best(search, items[at], barred_type, barred_launch) < INFINITY) continue;
    if (barred_type < 0 && barred_launch < 0) return 0;
    if (hold_best(search, items[at], NONE, NONE) == INFINITY) return 0;
  }
  return 1;
}

/* Ruins a few items, of the slowest ranks, of one type, or any; or all of one type. */
static int32_t rebuild_items(Search *search, int32_t most, int32_t near) {
  Task *task = search->task;
  uint64_t *random = &search->random;
  int32_t *order = search->order, way = below(random, 3), count = 0, ranks[PARTS + 1];
  int32_t is_whole_type = uniform(random) < WHOLE_TYPE, wanted = 2 + below(random, most - 1);
  int32_t type = way == 1 || is_whole_type ? some_type(task, random) : NONE;
  int32_t barred_type = is_whole_type || uniform(random) < BARRED ? type : NONE;
  if (is_whole_type) wanted = task->num_items;
  for (int32_t p = 0; p < PARTS; p++) ranks[p] = slowest_rank(task, p);
  ranks[PARTS] = below(random, task->num_ranks);
  shuffle(order, task->num_items, random);
  for (int32_t at = 0; at < task->num_items && count < wanted; at++) {
    int32_t is_taken = 1;
    if (type >= 0) is_taken = task->type_o[task->option_i[order[at]]] == type;
    else if (way == 0) is_taken = is_on_any(task, order[at], ranks, PARTS + 1);
    if (is_taken) count = bring(order, count, at);
  }
  set_exponent(search, FLAT + 2 * below(random, 2));
  if (!recreate(search, count, barred_type, NONE)) return 0;
  descend(search, order, is_whole_type || near > task->num_items ? task->num_items : near, 1);
  return 1;
}

/* Holds all items without a launch, if it is in use by no more than most of them; else lets them use it at no cost for
   once. */
static int32_t rebuild_launch(Search *search, int32_t launch) {
  Task *task = search->task;
  int32_t *order = search->order, count = 0;
  shuffle(order, task->num_items, &search->random);
  set_exponent(search, FLAT);
  if (search->absent_k[launch] < task->num_ranks) {
    for (int32_t at = 0; at < task->num_items; at++)
      if (uses(task, task->option_i[order[at]], launch)) count = bring(order, count, at);
    if (count > MOST_REBUILT * task->num_items || !recreate(search, count, NONE, launch)) return 0;
  } else {
    double *launch_p = task->launch_kp + launch * PARTS, kept_p[PARTS];
    memcpy(kept_p, launch_p, sizeof kept_p);
    memset(launch_p, 0, sizeof kept_p);
    for (int32_t at = 0; at < task->num_items && !is_over(search); at++) respond(search, order[at]);
    memcpy(launch_p, kept_p, sizeof kept_p);
    for (int32_t rank = 0; rank < task->num_ranks; rank++)
      if (task->count_kr[(size_t)launch * task->padded_ranks + rank])
        for (int32_t p = 0; p < PARTS; p++) task->load_pr[(size_t)p * task->padded_ranks + rank] += kept_p[p];
  }
  descend(search, order, task->num_items, 1);
  return 1;
}

/* All that a layout consists of, to go back to. */
typedef struct {
  int32_t *option_i, *site, *count_kr, num_synced;
  double *load_pr, *free_mr, sync_ms, step_ms;
} Saved;

static size_t padded(const Task *task, int32_t count) { return (size_t)count * task->padded_ranks; }

static void copy_state(Task *task, Saved *saved, int32_t back) {
  struct {
    void *now, *then;
    size_t size;
  } arrays[] = {
      {task->option_i, saved->option_i, task->num_items * sizeof(int32_t)},
      {task->site, saved->site, task->first_site_i[task->num_items] * sizeof(int32_t)},
      {task->count_kr, saved->count_kr, padded(task, task->num_launches) * sizeof(int32_t)},
      {task->load_pr, saved->load_pr, padded(task, PARTS) * sizeof(double)},
      {task->free_mr, saved->free_mr, padded(task, task->num_levels) * sizeof(double)},
      {&task->num_synced, &saved->num_synced, sizeof(int32_t)},
      {&task->sync_ms, &saved->sync_ms, sizeof(double)},
  };
  for (size_t at = 0; at < sizeof arrays / sizeof arrays[0]; at++)
    memcpy(back ? arrays[at].now : arrays[at].then, back ? arrays[at].then : arrays[at].now, arrays[at].size);
}

static void find_missing(Search *search) {
  Task *task = search->task;
  for (int32_t k = 0; k < task->num_launches; k++) {
    search->absent_k[k] = 0;
    for (int32_t r = 0; r < task->padded_ranks; r++) {
      size_t at = (size_t)k * task->padded_ranks + r;
      int32_t is_missing = r < task->num_ranks && task->count_kr[at] == 0;
      search->missing_kr[at] = is_missing;
      search->absent_k[k] += is_missing;
    }
  }
}

/* Goes on from what a round found if its step is below a limit, else back to what was before; keeps the best. */
static void accept(Search *search, int32_t is_found, double limit_ms, Saved *before, Saved *best) {
  Task *task = search->task;
  double step_ms = is_found ? slowest_ms(task) : INFINITY;
  if (step_ms < best->step_ms) {
    best->step_ms = step_ms;
    copy_state(task, best, 0);
  }
  if (step_ms < limit_ms) {
    before->step_ms = step_ms;
    copy_state(task, before, 0);
  } else {
    copy_state(task, before, 1);
    find_missing(search);
  }
}

/* Arrays of a search, one after the other in one block of memory. */
typedef struct {
  char *next;
  size_t size;
} Arena;

static void *taken(Arena *arena, size_t size) {
  size = (size + sizeof(Lanes) - 1) / sizeof(Lanes) * sizeof(Lanes);
  void *found = arena->next;
  if (arena->next) arena->next += size;
  arena->size += size;
  return found;
}

static void take_arrays(Arena *arena, Search *search, Saved *before, Saved *best) {
  const Task *task = search->task;
  size_t most_undo = (size_t)task->max_shards * task->num_ranks, num_sites = task->first_site_i[task->num_items];
  search->power_pr = taken(arena, padded(task, PARTS) * sizeof(double));
  search->missing_kr = taken(arena, padded(task, task->num_launches) * sizeof(double));
  search->score_r = taken(arena, padded(task, 1) * sizeof(double));
  search->num_bins = (task->num_ranks + BIN - 1) / BIN;
  search->least_pb = taken(arena, (size_t)PARTS * search->num_bins * sizeof(double));
  search->most_power_pb = taken(arena, (size_t)PARTS * search->num_bins * sizeof(double));
  search->bound_b = taken(arena, search->num_bins * sizeof(double));
  search->is_stale_b = taken(arena, search->num_bins);
  search->absent_k = taken(arena, task->num_launches * sizeof(int32_t));
  search->absent = taken(arena, task->num_launches * sizeof(int32_t));
  search->undo = taken(arena, most_undo * 2 * PARTS * sizeof(double));
  search->undo_rank = taken(arena, most_undo * sizeof(int32_t));
  search->sites = taken(arena, task->max_shards * sizeof(int32_t));
  search->best_sites = taken(arena, task->max_shards * sizeof(int32_t));
  search->kept_sites = taken(arena, task->max_shards * sizeof(int32_t));
  search->held = taken(arena, num_sites * sizeof(Held));
  search->padded_held = (int32_t)((num_sites + BLOCK - 1) / BLOCK * BLOCK);
  search->added_px = taken(arena, (size_t)PARTS * search->padded_held * sizeof(double));
  search->load_px = taken(arena, (size_t)PARTS * search->padded_held * sizeof(double));
  search->power_px = taken(arena, (size_t)PARTS * search->padded_held * sizeof(double));
  search->order = taken(arena, task->num_items * sizeof(int32_t));
  for (Saved *saved = before; saved; saved = saved == before ? best : NULL) {
    saved->option_i = taken(arena, task->num_items * sizeof(int32_t));
    saved->site = taken(arena, num_sites * sizeof(int32_t));
    saved->count_kr = taken(arena, padded(task, task->num_launches) * sizeof(int32_t));
    saved->load_pr = taken(arena, padded(task, PARTS) * sizeof(double));
    saved->free_mr = taken(arena, padded(task, task->num_levels) * sizeof(double));
  }
}

/* Placing all items from nothing. */

/* What an option adds by slopes at its cheapest sites, where its shards are then, and which are left in `sites`; infinite,
   and nothing is held, where it finds no room. What is to stay is not weighed, and cannot be taken back: 0 then. */
static double put(Search *search, int32_t option, int32_t is_to_stay) {
  const Task *task = search->task;
  int32_t node = -1;
  double grown = 0, added_p[PARTS];
  search->num_undo = 0;
  for (int32_t number = 0; number < num_shards(task, option); number++) {
    int32_t shard = task->first_shard_o[option] + number, site = best_site(search, shard, node);
    if (site < 0) {
      take_back(search, option, number);
      return INFINITY;
    }
    search->sites[number] = site;
    if (task->in_node_e[shard]) node = site * task->holders_e[shard] / task->node_size;
    if (is_to_stay) {
      if (number + 1 < num_shards(task, option)) try_shard(search, shard, site);
      else add_shard(search, shard, site, 1);
      continue;
    }
    added_powers(search, shard, site, added_p);
    for (int32_t p = 0; p < PARTS; p++) grown += search->slope_p[p] * added_p[p];
    if (task->is_shared_e[shard]) grown += task->sync_v[task->kind_e[shard]];
    try_shard(search, shard, site);
  }
  return grown;
}

/* The option of an item that adds least by slopes, of those that may be taken; -1 where none finds room. */
static int32_t least_option(Search *search, int32_t item) {
  const Task *task = search->task;
  int32_t best = -1;
  double least = INFINITY;
  for (int32_t option = task->first_option_i[item]; option < task->first_option_i[item + 1]; option++) {
    if (!task->may_o[option]) continue;
    double grown = put(search, option, 0);
    if (grown == INFINITY) continue;
    take_back(search, option, num_shards(task, option));
    if (grown < least) {
      least = grown;
      best = option;
    }
  }
  return best;
}

/* Whether this machine can run the search as it is compiled for wider vectors: with other instructions, to the same
   results. */
int32_t autoshard_has_avx2(void) {
#if defined(__x86_64__) && defined(__GNUC__)
  return __builtin_cpu_supports("avx2") != 0;
#else
  return 0;
#endif
}

/* Places items in an order, on ranks that hold nothing: each by the option that it has, or where that finds no room by the
   one that adds least, where loads are least by the flattest norm of their shares of some loads.

   Returns 1, and the items' options and sites are in the task; 0 where one finds no room; -1 if there is no memory. */
int32_t autoshard_place(Task *task, const int32_t *order, const double *share_of_p) {
  Search search = {.task = task, .log2_exponent = FLAT};
  Saved before = {0}, best = {0};
  Arena arena = {0};
  take_arrays(&arena, &search, &before, &best);
  char *block = arena.next = aligned_alloc(sizeof(Lanes), arena.size);
  if (!block) return -1;
  take_arrays(&arena, &search, &before, &best);
  find_missing(&search);
  memset(search.power_pr, 0, padded(task, PARTS) * sizeof(double));
  memset(search.is_stale_b, 1, search.num_bins);
  for (int32_t p = 0; p < PARTS; p++) search.scale_p[p] = search.slope_p[p] = share_of_p[p];
  int32_t is_placed = 1;
  for (int32_t at = 0; at < task->num_items && is_placed; at++) {
    int32_t item = order[at];
    if (put(&search, task->option_i[item], 1) == INFINITY) {
      int32_t option = least_option(&search, item);
      if ((is_placed = option >= 0)) put(&search, task->option_i[item] = option, 1);
    }
    if (is_placed)
      memcpy(task->site + task->first_site_i[item], search.sites, num_shards(task, task->option_i[item]) * sizeof(int32_t));
  }
  free(block);
  return is_placed;
}

/* Improves a layout: by a descent of all items, by one rebuilding for each launch, or by rounds of ruin and recreate.

   rounds: of ruin and recreate. most: most items of a ruin. near: items of the descent after it, the ruined ones and others at random. heat: excess over
   the layout before, as a share, that is accepted at first; it falls to 0 until the last round.

   Returns the step by the slowest ranks of the best layout, which is left in the task, without what is the same for all
   layouts; NaN if there is no memory, and the layout as it was. */
double autoshard_improve(Task *task, int32_t mode, int32_t rounds, int32_t most, int32_t near, double heat) {
  Search search = {.task = task, .random = task->seed};
  Saved before = {0}, best = {0};
  Arena arena = {0};
  take_arrays(&arena, &search, &before, &best);
  char *block = arena.next = aligned_alloc(sizeof(Lanes), arena.size);
  if (!block) return NAN;
  take_arrays(&arena, &search, &before, &best);
  for (int32_t item = 0; item < task->num_items; item++) search.order[item] = item;
  find_missing(&search);
  before.step_ms = best.step_ms = slowest_ms(task);
  copy_state(task, &before, 0);
  copy_state(task, &best, 0);
  if (mode == DESCEND) {
    relieve(&search);
    accept(&search, 1, before.step_ms, &before, &best);
    shuffle(search.order, task->num_items, &search.random);
    descend(&search, search.order, task->num_items, SWEEPS);
    accept(&search, 1, before.step_ms, &before, &best);
  }
  for (int32_t launch = 0; mode == LAUNCH_BY_LAUNCH && launch < task->num_launches && !is_over(&search); launch++)
    accept(&search, rebuild_launch(&search, launch), before.step_ms, &before, &best);
  for (int32_t round = 0; mode == RUIN && round < rounds && !is_over(&search); round++) {
    double limit_ms = before.step_ms * (1 + heat * uniform(&search.random) * (rounds - round) / rounds);
    int32_t is_launch = task->num_launches && uniform(&search.random) < LAUNCHES;
    int32_t is_found = is_launch ? rebuild_launch(&search, below(&search.random, task->num_launches))
                                 : rebuild_items(&search, most, near);
    accept(&search, is_found, limit_ms, &before, &best);
  }
  copy_state(task, &best, 1);
  free(block);
  return best.step_ms;
}
