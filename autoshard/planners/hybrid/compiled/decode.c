/* Plays episodes of the game of env/game.py as the network of policies/network.py chooses: the same rules and the same
   scores, in single precision, without a call of numpy for each step.

   Index names as in search.c; n item in its order, s site, u hidden unit, f feature. What shards take of memory and what
   ranks have of it are read as the game has them. No sum is reordered, so that all machines make the same choices. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "task.h"

enum { CONTEXT = 2 * PARTS + 5, PLACE = PARTS + 6, MAX_HIDDEN = 256 };
/* Differences between sites are about an eighth of an even share. */
static const double MARGIN_SCALE = 8.0;

/* One episode as it stands; `left_rm` and `back_rm` are for looking ahead. */
typedef struct {
  const Decode *game;
  uint64_t random;
  double *load_rp, *power_rp, *free_rm, *room_rm, *left_rm, *back_rm, sync_ms;
  double *after_sp, *rise_s, *energy_s, *free_s;
  int32_t *option_i, *site, *sites, *tried, *node_of;
  uint8_t *may;
  float *score;
} Episode;

/* SplitMix64 (Steele, Lea and Flood, 2014), as a number above 0 and below 1. */
static double uniform(uint64_t *state) {
  uint64_t mixed = (*state += 0x9E3779B97F4A7C15ull);
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
  return ((double)((mixed ^ (mixed >> 31)) >> 12) + 0.5) * 0x1.0p-52;
}

/* Network. */

/* Adds the product of a vector and a matrix. */
static void add_product(float *restrict sum_u, const float *restrict value_f, const float *restrict weight_fu, int32_t num_f,
                        int32_t num_u) {
  for (int32_t f = 0; f < num_f; f++)
    for (int32_t u = 0; u < num_u; u++) sum_u[u] += value_f[f] * weight_fu[(size_t)f * num_u + u];
}

static void take_positive(float *value_u, int32_t num_u) {
  for (int32_t u = 0; u < num_u; u++) value_u[u] = value_u[u] > 0 ? value_u[u] : 0;
}

static float product(const float *value_u, const float *weight_u, int32_t num_u) {
  float sum = 0;
  for (int32_t u = 0; u < num_u; u++) sum += value_u[u] * weight_u[u];
  return sum;
}

/* States of an LSTM by what items add to its gates; the gates are keep, take, show and new, as the network has them.

   gates_ng: N rows of 4 H; of_state_hg: H rows of 4 H; state_nh: N rows of H, the result. */
void autoshard_states(const float *gates_ng, const float *of_state_hg, int32_t num_items, int32_t width, float *state_nh) {
  float now_g[4 * MAX_HIDDEN], cell_h[MAX_HIDDEN] = {0}, state_h[MAX_HIDDEN] = {0};
  for (int32_t n = 0; n < num_items; n++) {
    memcpy(now_g, gates_ng + (size_t)n * 4 * width, 4 * width * sizeof(float));
    add_product(now_g, state_h, of_state_hg, width, 4 * width);
    for (int32_t h = 0; h < 3 * width; h++) now_g[h] = 0.5f * tanhf(0.5f * now_g[h]) + 0.5f;
    for (int32_t h = 0; h < width; h++) {
      cell_h[h] = now_g[h] * cell_h[h] + now_g[width + h] * tanhf(now_g[3 * width + h]);
      state_h[h] = now_g[2 * width + h] * tanhf(cell_h[h]);
    }
    memcpy(state_nh + (size_t)n * width, state_h, width * sizeof(float));
  }
}

/* Memory. */

static int32_t num_shards(const Decode *game, int32_t option) {
  return game->first_shard_o[option + 1] - game->first_shard_o[option];
}

static void hold(const Decode *game, double *room_rm, int32_t shard, int32_t site, int32_t sign) {
  int32_t holders = game->holders_e[shard], levels = game->num_levels;
  for (int32_t r = site * holders; r < (site + 1) * holders; r++)
    for (int32_t m = 0; m < levels; m++) room_rm[r * levels + m] += sign * game->own_em[shard * levels + m];
  if (game->all_e[shard] != 0)
    for (int32_t r = 0; r < game->num_ranks; r++) room_rm[r * levels] += sign * game->all_e[shard];
}

static void hold_all(const Decode *game, double *room_rm, int32_t option, const int32_t *sites, int32_t sign) {
  for (int32_t number = 0; number < num_shards(game, option); number++)
    hold(game, room_rm, game->first_shard_o[option] + number, sites[number], sign);
}

static int32_t is_allowed(const Decode *game, int32_t shard, int32_t site) {
  int32_t set = game->allowed_e[shard];
  return set < 0 || game->allowed[(size_t)set * game->num_ranks + site];
}

/* Least of the device memory that ranks of a site have left beside a shard; negative where some level has too little. */
static double least_left(const Decode *game, const double *room_rm, int32_t shard, int32_t site) {
  int32_t holders = game->holders_e[shard], levels = game->num_levels;
  double least = INFINITY;
  int32_t fits = 1;
  for (int32_t r = site * holders; r < (site + 1) * holders; r++)
    for (int32_t m = 0; m < levels; m++) {
      double left = room_rm[r * levels + m] - game->own_em[shard * levels + m];
      fits &= left >= 0;
      if (m == 0 && left < least) least = left;
    }
  return fits ? least : -1;
}

/* Sites for the shards of an option, each where most room is left, within a node or, below 0, anywhere; 0 where some find
   none. */
static int32_t find_within(const Episode *play, const double *room_rm, int32_t option, int32_t node, int32_t *sites) {
  const Decode *game = play->game;
  int32_t levels = game->num_levels;
  memcpy(play->left_rm, room_rm, (size_t)game->num_ranks * levels * sizeof(double));
  for (int32_t number = 0; number < num_shards(game, option); number++) {
    int32_t shard = game->first_shard_o[option] + number, best = -1;
    double most = -1;
    if (game->is_shared_e[shard]) best = 0;
    if (game->all_e[shard] != 0)
      for (int32_t r = 0; r < game->num_ranks; r++) play->left_rm[r * levels] -= game->all_e[shard];
    for (int32_t site = 0; !game->is_shared_e[shard] && site < game->num_ranks / game->holders_e[shard]; site++) {
      if ((node >= 0 && site / game->node_size != node) || !is_allowed(game, shard, site)) continue;
      double least = least_left(game, play->left_rm, shard, site);
      if (least > most) {
        most = least;
        best = site;
      }
    }
    if (best < 0) return 0;
    sites[number] = best;
    int32_t holders = game->is_shared_e[shard] ? game->num_ranks : game->holders_e[shard];
    for (int32_t r = best * holders; r < (best + 1) * holders; r++)
      for (int32_t m = 0; m < levels; m++) play->left_rm[r * levels + m] -= game->own_em[shard * levels + m];
  }
  for (int32_t at = 0; at < game->num_ranks * levels; at++)
    if (play->left_rm[at] < 0) return 0;
  return 1;
}

/* As `find_within`; options that keep to a node are tried in the one with most room first. */
static int32_t find_sites(const Episode *play, const double *room_rm, int32_t option, int32_t *sites) {
  const Decode *game = play->game;
  if (!game->in_node_e[game->first_shard_o[option]]) return find_within(play, room_rm, option, -1, sites);
  int32_t num_nodes = game->num_ranks / game->node_size, levels = game->num_levels;
  double *room_n = play->energy_s;
  for (int32_t node = 0; node < num_nodes; node++) {
    room_n[node] = 0;
    for (int32_t r = node * game->node_size; r < (node + 1) * game->node_size; r++) room_n[node] += room_rm[r * levels];
    int32_t at = node;
    for (; at > 0 && room_n[play->node_of[at - 1]] < room_n[node]; at--) play->node_of[at] = play->node_of[at - 1];
    play->node_of[at] = node;
  }
  for (int32_t at = 0; at < num_nodes; at++)
    if (find_within(play, room_rm, option, play->node_of[at], sites)) return 1;
  return 0;
}

/* Masks. */

static void mask_options(const Episode *play, int32_t item) {
  const Decode *game = play->game;
  int32_t levels = game->num_levels;
  for (int32_t option = game->first_option_i[item]; option < game->first_option_i[item + 1]; option++) {
    /* Where the fullest rank has room for all parts of an option, any sites will do. */
    int32_t may = 1;
    for (int32_t m = 0; m < levels && may; m++) {
      double own = 0;
      for (int32_t shard = game->first_shard_o[option]; shard < game->first_shard_o[option + 1]; shard++) {
        own += game->own_em[shard * levels + m] + (m == 0 ? game->all_e[shard] : 0);
        may &= game->allowed_e[shard] < 0;
      }
      for (int32_t r = 0; r < game->num_ranks && may; r++) may = play->room_rm[r * levels + m] >= own;
    }
    if (option == game->witness_option_i[item]) may = 1;
    play->may[option - game->first_option_i[item]] = may || find_sites(play, play->room_rm, option, play->tried);
  }
}

/* Sites of all parts of the item that is up in another node. */
static int32_t find_in_node(const Episode *play, int32_t option, int32_t node) {
  memcpy(play->back_rm, play->room_rm, (size_t)play->game->num_ranks * play->game->num_levels * sizeof(double));
  hold_all(play->game, play->back_rm, option, play->sites, 1);
  return find_within(play, play->back_rm, option, node, play->tried);
}

static void mask_sites(const Episode *play, int32_t option, int32_t number) {
  const Decode *game = play->game;
  int32_t shard = game->first_shard_o[option] + number, now = play->sites[number], node = now / game->node_size;
  int32_t num_sites = game->num_ranks / game->holders_e[shard];
  for (int32_t site = 0; site < num_sites; site++) {
    int32_t is_here = !game->in_node_e[shard] || site / game->node_size == node;
    play->may[site] =
        is_here && is_allowed(game, shard, site) && (site == now || least_left(game, play->room_rm, shard, site) >= 0);
  }
  for (int32_t other = 0; game->in_node_e[shard] && number == 0 && other < game->num_ranks / game->node_size; other++)
    if (other != node && find_in_node(play, option, other)) play->may[play->tried[0]] = 1;
}

/* Features. */

static double fourth(double value) {
  double square = value * value;
  return square * square;
}

static void find_context(const Episode *play, int32_t n, float *context_f) {
  const Decode *game = play->game;
  double scale = PARTS / game->unit_ms, least = INFINITY, sum = 0;
  for (int32_t p = 0; p < PARTS; p++) {
    double most = 0, all = 0;
    for (int32_t r = 0; r < game->num_ranks; r++) {
      most = fmax(most, play->load_rp[r * PARTS + p]);
      all += play->load_rp[r * PARTS + p];
    }
    context_f[p] = (float)(most * scale);
    context_f[PARTS + p] = (float)(all * scale / game->num_ranks);
  }
  for (int32_t r = 0; r < game->num_ranks; r++) {
    double free = play->free_rm[r * game->num_levels] / fmax(game->capacity_rm[r * game->num_levels], 1);
    least = fmin(least, free);
    sum += free;
  }
  float *rest_f = context_f + 2 * PARTS;
  rest_f[0] = (float)(play->sync_ms / game->unit_ms);
  rest_f[1] = (float)least;
  rest_f[2] = (float)(sum / game->num_ranks);
  rest_f[3] = (float)game->left_n[n];
  rest_f[4] = (float)(1 - (double)n / game->num_items);
}

/* What tells sites of a shard apart, to the arrays of the episode. */
static void find_places(const Episode *play, int32_t shard) {
  const Decode *game = play->game;
  int32_t holders = game->holders_e[shard], levels = game->num_levels;
  const double *added_p = game->load_ep + (size_t)shard * PARTS;
  double most_p[PARTS] = {0};
  for (int32_t r = 0; r < game->num_ranks; r++)
    for (int32_t p = 0; p < PARTS; p++) most_p[p] = fmax(most_p[p], play->load_rp[r * PARTS + p]);
  for (int32_t site = 0; site < game->num_ranks / holders; site++) {
    double *after_p = play->after_sp + (size_t)site * PARTS, energy = -INFINITY, least = INFINITY, rise = 0;
    for (int32_t p = 0; p < PARTS; p++) after_p[p] = -INFINITY;
    for (int32_t r = site * holders; r < (site + 1) * holders; r++) {
      double power = 0;
      for (int32_t p = 0; p < PARTS; p++) {
        double after = play->load_rp[r * PARTS + p] + added_p[p];
        after_p[p] = fmax(after_p[p], after);
        power += (fourth(after / game->mean_p[p]) - play->power_rp[r * PARTS + p]) * game->weight_p[p] * game->mean_p[p];
      }
      energy = fmax(energy, log1p(power / game->unit_ms));
      double left = play->free_rm[r * levels] - game->own_em[shard * levels];
      least = fmin(least, left / fmax(game->capacity_rm[r * levels], 1));
    }
    for (int32_t p = 0; p < PARTS; p++) rise += fmax(after_p[p] - most_p[p], 0) * game->weight_p[p];
    play->rise_s[site] = rise / game->unit_ms;
    play->energy_s[site] = energy;
    play->free_s[site] = least;
  }
}

/* Choices. */

/* The best of what may be chosen, or one that is drawn by its probability: exponential races draw from a softmax. */
static int32_t chosen(Episode *play, int32_t num, int32_t is_drawn) {
  int32_t best = -1;
  double most = -INFINITY;
  for (int32_t at = 0; at < num; at++) {
    if (!play->may[at]) continue;
    double score = play->score[at];
    if (is_drawn) score -= log(-log(uniform(&play->random)));
    if (best < 0 || score > most) {
      most = score;
      best = at;
    }
  }
  return best;
}

static int32_t choose_option(Episode *play, int32_t n, int32_t is_drawn) {
  const Decode *game = play->game;
  int32_t item = game->order_i[n], first = game->first_option_i[item], num = game->first_option_i[item + 1] - first;
  float context_f[CONTEXT], base_u[MAX_HIDDEN], hidden_u[MAX_HIDDEN], last_u[MAX_HIDDEN];
  find_context(play, n, context_f);
  memcpy(base_u, game->option_state_nu + (size_t)n * game->option_hidden, game->option_hidden * sizeof(float));
  add_product(base_u, context_f, game->option_context, CONTEXT, game->option_hidden);
  mask_options(play, item);
  for (int32_t at = 0; at < num; at++) {
    if (!play->may[at]) continue;
    const float *own_u = game->option_ou + (size_t)(first + at) * game->option_hidden;
    for (int32_t u = 0; u < game->option_hidden; u++) hidden_u[u] = own_u[u] + base_u[u];
    take_positive(hidden_u, game->option_hidden);
    memcpy(last_u, game->option_second_bias, game->option_last_width * sizeof(float));
    add_product(last_u, hidden_u, game->option_second, game->option_hidden, game->option_last_width);
    take_positive(last_u, game->option_last_width);
    play->score[at] = product(last_u, game->option_last, game->option_last_width);
  }
  return first + chosen(play, num, is_drawn);
}

static int32_t choose_site(Episode *play, int32_t n, int32_t option, int32_t number) {
  const Decode *game = play->game;
  int32_t shard = game->first_shard_o[option] + number, num = game->num_ranks / game->holders_e[shard];
  float context_f[CONTEXT], place_f[PLACE], base_u[MAX_HIDDEN], hidden_u[MAX_HIDDEN];
  find_context(play, n, context_f);
  memcpy(base_u, game->place_state_nu + (size_t)n * game->place_hidden, game->place_hidden * sizeof(float));
  add_product(base_u, context_f, game->place_context, CONTEXT, game->place_hidden);
  mask_sites(play, option, number);
  find_places(play, shard);
  double least_rise = INFINITY, least_energy = INFINITY;
  for (int32_t site = 0; site < num; site++) {
    least_rise = fmin(least_rise, play->rise_s[site]);
    least_energy = fmin(least_energy, play->energy_s[site]);
  }
  for (int32_t site = 0; site < num; site++) {
    if (!play->may[site]) continue;
    for (int32_t p = 0; p < PARTS; p++) place_f[p] = (float)(play->after_sp[site * PARTS + p] * (PARTS / game->unit_ms));
    float *rest_f = place_f + PARTS;
    rest_f[0] = (float)play->rise_s[site];
    rest_f[1] = (float)(MARGIN_SCALE * (play->rise_s[site] - least_rise));
    rest_f[2] = (float)(play->energy_s[site] - least_energy);
    rest_f[3] = (float)play->free_s[site];
    rest_f[4] = game->holders_e[shard] > 1;
    rest_f[5] = 1;
    memcpy(hidden_u, base_u, game->place_hidden * sizeof(float));
    add_product(hidden_u, place_f, game->place_of_place, PLACE, game->place_hidden);
    take_positive(hidden_u, game->place_hidden);
    play->score[site] = product(hidden_u, game->place_last, game->place_hidden);
  }
  return chosen(play, num, 0);
}

/* Adds what a shard adds to its ranks. */
static void load(Episode *play, int32_t shard, int32_t site) {
  const Decode *game = play->game;
  int32_t holders = game->holders_e[shard];
  for (int32_t r = site * holders; r < (site + 1) * holders; r++)
    for (int32_t p = 0; p < PARTS; p++) {
      double *load = &play->load_rp[r * PARTS + p];
      *load += game->load_ep[(size_t)shard * PARTS + p];
      play->power_rp[r * PARTS + p] = fourth(*load / game->mean_p[p]);
    }
  play->sync_ms += game->sync_e[shard];
  hold(game, play->free_rm, shard, site, -1);
}

static void place(Episode *play, int32_t option, int32_t number, int32_t site) {
  const Decode *game = play->game;
  int32_t shard = game->first_shard_o[option] + number, now = play->sites[number];
  if (number == 0 && game->in_node_e[shard] && site / game->node_size != now / game->node_size) {
    if (find_in_node(play, option, site / game->node_size)) {
      hold_all(game, play->room_rm, option, play->sites, 1);
      hold_all(game, play->room_rm, option, play->tried, -1);
      memcpy(play->sites, play->tried, num_shards(game, option) * sizeof(int32_t));
    }
  } else if (site != now) {
    hold(game, play->room_rm, shard, now, 1);
    hold(game, play->room_rm, shard, site, -1);
    play->sites[number] = site;
  }
  load(play, shard, play->sites[number]);
}

static void play_items(Episode *play, int32_t is_drawn) {
  const Decode *game = play->game;
  for (int32_t n = 0; n < game->num_items; n++) {
    int32_t item = game->order_i[n], own = game->witness_option_i[item];
    const int32_t *own_sites = game->witness_site + game->first_site_i[item];
    hold_all(game, play->room_rm, own, own_sites, 1);
    int32_t option = choose_option(play, n, is_drawn), num = num_shards(game, option);
    if (option == own) memcpy(play->sites, own_sites, num * sizeof(int32_t));
    else find_sites(play, play->room_rm, option, play->sites);
    hold_all(game, play->room_rm, option, play->sites, -1);
    for (int32_t number = 0; number < num; number++)
      if (game->is_shared_e[game->first_shard_o[option] + number]) load(play, game->first_shard_o[option] + number, 0);
    for (int32_t number = 0; number < num; number++)
      if (!game->is_shared_e[game->first_shard_o[option] + number])
        place(play, option, number, choose_site(play, n, option, number));
    play->option_i[item] = option;
    memcpy(play->site + game->first_site_i[item], play->sites, num * sizeof(int32_t));
  }
}

/* Plays episodes, of which the first takes the likeliest choices, and the others draw their options.

   Returns 0, and each episode's options and sites are in the game; -1 if there is no memory. */
int32_t autoshard_decode(const Decode *game) {
  size_t ranks = game->num_ranks, held = ranks * game->num_levels, most = game->max_shards, choices = ranks;
  for (int32_t item = 0; item < game->num_items; item++) {
    size_t num = game->first_option_i[item + 1] - game->first_option_i[item];
    choices = num > choices ? num : choices;
  }
  double *numbers = malloc((3 * ranks * PARTS + 4 * held + 3 * ranks) * sizeof(double));
  int32_t *integers = malloc((2 * most + ranks) * sizeof(int32_t));
  float *scores = malloc(choices * sizeof(float));
  uint8_t *may = malloc(choices);
  int32_t is_done = numbers && integers && scores && may;
  for (int32_t episode = 0; is_done && episode < game->num_episodes; episode++) {
    Episode play = {
        .game = game,
        .random = game->seed + (uint64_t)episode * 0xD1B54A32D192ED03ull,
        .load_rp = numbers,
        .power_rp = numbers + ranks * PARTS,
        .after_sp = numbers + 2 * ranks * PARTS,
        .free_rm = numbers + 3 * ranks * PARTS,
        .option_i = game->option_ei + (size_t)episode * game->num_items,
        .site = game->site_ey + (size_t)episode * game->first_site_i[game->num_items],
        .sites = integers,
        .tried = integers + most,
        .node_of = integers + 2 * most,
        .may = may,
        .score = scores,
    };
    play.room_rm = play.free_rm + held;
    play.left_rm = play.room_rm + held;
    play.back_rm = play.left_rm + held;
    play.rise_s = play.back_rm + held;
    play.energy_s = play.rise_s + ranks;
    play.free_s = play.energy_s + ranks;
    memset(play.load_rp, 0, 2 * ranks * PARTS * sizeof(double));
    memcpy(play.free_rm, game->capacity_rm, held * sizeof(double));
    memcpy(play.room_rm, game->room_rm, held * sizeof(double));
    play_items(&play, episode > 0);
  }
  free(numbers);
  free(integers);
  free(scores);
  free(may);
  return is_done ? 0 : -1;
}
