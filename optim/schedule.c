/* optim: the learning-rate schedules. */
#include "optim/schedule.h"

#include <math.h>

const char *const schedule_kind_names[] = {"cosine", "linear", "wsd", "constant", NULL};

/* (1 + cos(pi p)) / 2 = cos^2(pi p / 2) = 1 - sin^2(pi p / 2), by the FP32 functions, whose bits do not depend on the
 * machine. The form with the small sine or cosine keeps the value off 1 next to the peak and off 0 next to the end. */
static double cosine_fall(double p)
{
    float half_angle = (float)(M_PI_2 * p);
    if (p <= 0.5) {
        double s = (double)sinf(half_angle);
        return 1.0 - s * s;
    }
    double c = (double)cosf(half_angle);
    return c * c;
}

double schedule_factor(const struct schedule *s, int64_t update)
{
    ASSERT(s->steps >= 1 && update >= 1 && update <= s->steps && s->warmup >= 0);
    ASSERT(s->warmup < s->steps || s->steps == 1);
    if (update == s->steps && s->kind != SCHEDULE_CONSTANT) {
        return (double)s->final_fraction;
    }
    int64_t peak = s->warmup > 1 ? s->warmup : 1;
    if (update <= peak) {
        return (double)update / (double)peak;
    }
    if (s->kind == SCHEDULE_CONSTANT) {
        return 1.0;
    }
    int64_t start = peak; /* the last update at the peak */
    if (s->kind == SCHEDULE_WSD) {
        int64_t decay = (int64_t)((double)s->decay_fraction * (double)s->steps + 0.5);
        start = s->steps - decay > peak ? s->steps - decay : peak;
        if (update <= start) {
            return 1.0;
        }
    }
    double p = (double)(update - start) / (double)(s->steps - start);
    double final = (double)s->final_fraction;
    return s->kind == SCHEDULE_COSINE ? final + (1.0 - final) * cosine_fall(p) : 1.0 - (1.0 - final) * p;
}
