// Which variant a problem takes, and its grid: choice.py and LaunchPlan.grid of package.py in C++.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"

namespace {

constexpr size_t MOST_SIZES = 10;

// What tiles cut: (0, a dimension's number), (1, a whole number) or (2, the number of an operation on the two values before),
// one after another: `quantity` of manifest.py.
using Quantity = std::vector<std::pair<int, std::int64_t>>;

inline std::int64_t value_of(const Quantity& quantity, const std::int64_t* sizes) {
    std::vector<std::int64_t> values;
    for (const auto& [kind, number] : quantity) {
        if (kind < 2) {
            values.push_back(kind ? number : sizes[number]);
            continue;
        }
        const std::int64_t b = values.back();
        values.pop_back();
        std::int64_t& a = values.back();
        const auto rest = [&] { return (a % b + b) % b; };
        a = number == 0 ? a + b : number == 1 ? a - b : number == 2 ? a * b : number == 3 ? (a - rest()) / b
          : number == 4 ? rest() : number == 5 ? std::min(a, b) : std::max(a, b);
    }
    return values.back();
}

// A launch, less its grid, and what that is at any size: LaunchPlan of package.py.
struct Step {
    Launch launch;
    std::vector<std::pair<Quantity, std::int64_t>> tiles;
    std::int64_t blocks_per_tile = 1, most_blocks = 0;
    bool axes = false;

    // (x, y, z) as LaunchPlan.grid has it; false for one that the driver does not take.
    bool grid(const std::int64_t* sizes, unsigned* found) const {
        double blocks[3] = {1, 1, 1};  // exact as long as the driver takes them
        size_t axis = 0;
        for (const auto& [cut, size] : tiles) {
            const std::int64_t whole = cut.size() == 1 && !cut[0].first ? sizes[cut[0].second] : std::max<std::int64_t>(0, value_of(cut, sizes));
            blocks[axes ? axis++ : 0] *= (whole + size - 1) / size;
        }
        blocks[0] *= blocks_per_tile;
        if (most_blocks) blocks[0] = std::min(blocks[0], static_cast<double>(most_blocks));
        blocks[0] *= launch.cluster;
        for (int i = 0; i < 3; ++i) {
            if (blocks[i] > (i ? 65535.0 : 2147483647.0)) return false;
            found[i] = static_cast<unsigned>(blocks[i]);
        }
        return true;
    }
};

// What a call has beside its first launch: those that follow it, and its workspace arguments.
struct More {
    struct Piece {
        std::int64_t bytes;  // for one element of each of the dimensions
        std::vector<size_t> dimensions;
        bool zeroed;
    };
    std::vector<Step> steps;
    std::vector<Piece> workspace;
};

using Text = std::shared_ptr<const std::string>;  // for people; shared, as every call has one
// How a problem is served. `text`: the variant, or why there is none; null: that has to be asked. `how`: it was chosen.
struct Answer {
    Launch launch;
    std::shared_ptr<const More> more;  // of a call that makes several launches; null: that is all
    int variant = -1;
    Text text;
    const char* how = "";
    bool undecided = false;   // a race decides
    bool gives_more = false;  // it gives outputs that the problem does not ask for

    bool serves() const { return variant >= 0; }
    std::string in_words() const { return (serves() ? "" : "PyTorch: ") + *text + how; }
};

// Problems of one bucket are served as the first of them that was measured: sizes to half a doubling, and whether they are
// whole vectors, as in choice.py.
inline std::int64_t bucket_of(std::int64_t size, double log) { return 2 * static_cast<std::int64_t>(2 * log + 0.5) + (size % 8 == 0); }

// Of a problem's sizes: which there may be, and whether it is compiled in.
struct Dimension {
    std::int64_t low, high;
    bool fixed_on_cpu, fixed_on_gpu;
};

// What was tuned at one problem, or won a race at it. No `text`: it is not loaded yet.
struct Member {
    std::vector<double> logs;           // of its sizes
    std::vector<std::int64_t> buckets;  // likewise
    Text slower;               // why problems near them are left to PyTorch, if they are
    Text text;
    int variant = -1;
    bool measured = false, gives_more = false;
    Step first;
    std::shared_ptr<const More> more;

    static double log_of(std::int64_t size) { return std::log2(static_cast<double>(std::max<std::int64_t>(size, 1))); }

    void add_size(std::int64_t size) { logs.push_back(log_of(size)), buckets.push_back(bucket_of(size, logs.back())); }

    Answer answer(const std::int64_t* sizes) const {
        Answer found;
        if (slower) {
            found.text = slower;
        } else if (variant < 0) {
            found.text = text;
        } else {
            found.launch = first.launch, found.more = more, found.gives_more = gives_more;
            if (first.grid(sizes, found.launch.grid)) found.variant = variant, found.text = text;
        }
        return found;
    }
};

struct Family {
    std::vector<Member> members;
    Text text;           // why there are none
    bool races = false;  // whether what no measurement decides is raced

    Answer answer(const std::int64_t* sizes, size_t count) const {
        using Distance = std::array<std::int64_t, 1 + MOST_SIZES>;  // the sum, then the last dimension's, and so on
        if (members.empty()) {
            Answer none;
            none.text = text;
            return none;
        }
        double logs[MOST_SIZES];
        for (size_t i = 0; i < count; ++i) logs[i] = Member::log_of(sizes[i]);
        const Member* nearest = nullptr;
        Distance least{};
        for (const Member& m : members) {
            Distance distance{};
            for (size_t i = 0; i < count; ++i)  // rounded as in choice.py, and without a call of the library
                distance[0] += distance[count - i] = static_cast<std::int64_t>(1e6 * std::fabs(m.logs[i] - logs[i]) + 0.5);
            if (!nearest || distance < least) nearest = &m, least = distance;
        }
        bool decided = nearest->measured;
        for (size_t i = 0; i < count; ++i) decided = decided && nearest->buckets[i] == bucket_of(sizes[i], logs[i]);
        Answer answer;
        answer.undecided = races && !decided;
        if (answer.undecided) return answer;
        answer = nearest->answer(sizes);
        if (answer.serves())
            answer.how = !decided ? ", the nearest, not reliably timed at such sizes" : least[0] ? ", the nearest that was measured" : ", measured at these sizes";
        return answer;
    }
};

}  // namespace
