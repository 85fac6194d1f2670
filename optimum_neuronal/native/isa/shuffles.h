/* For every byte of a mask, which bytes of the next eight 16-bit values go where: a table for byte shuffles, in which
 * 0x80 gives zero. For processors without an instruction that expands. */
#pragma once

#include "../common.h"

static uint8_t SHUFFLE16[256][16] __attribute__((aligned(64)));
static int8_t SHUFFLE32[256][8]
    __attribute__((aligned(64))); /* the same for eight 32-bit values: their numbers, or -1 */

static void __attribute__((constructor)) fill_shuffles(void) {
    for (int mask = 0; mask < 256; mask++) {
        int next = 0;
        for (int column = 0; column < 8; column++) {
            int kept = mask >> column & 1;
            SHUFFLE16[mask][2 * column] = kept ? (uint8_t)(2 * next) : 0x80;
            SHUFFLE16[mask][2 * column + 1] = kept ? (uint8_t)(2 * next + 1) : 0x80;
            SHUFFLE32[mask][column] = kept ? (int8_t)next : -1;
            next += kept;
        }
    }
}
