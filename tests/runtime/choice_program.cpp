// choice.h on its own: members and problems by standard input, and of each problem the answer by standard output.
#include <cstdio>
#include <iostream>

#include "choice.h"

int main() {
    size_t sizes, members, tiles, problems;
    Family family;
    std::cin >> sizes >> family.races >> members;
    for (size_t i = 0; i < members; ++i) {
        Member m;
        std::int64_t size;
        for (size_t d = 0; d < sizes; ++d) std::cin >> size, m.add_size(size);
        bool slower;
        std::cin >> slower >> m.measured >> m.first.blocks_per_tile >> m.first.most_blocks >> m.first.axes >> m.first.launch.cluster >> tiles;
        for (size_t t = 0; t < tiles; ++t) {
            size_t parts;
            auto& [cut, tile] = m.first.tiles.emplace_back();
            for (std::cin >> tile >> parts; parts; --parts) {
                auto& [kind, number] = cut.emplace_back();
                std::cin >> kind >> number;
            }
        }
        if (slower) m.slower = std::make_shared<const std::string>("slower");
        m.text = std::make_shared<const std::string>("serves"), m.variant = static_cast<int>(i);
        family.members.push_back(m);
    }
    for (std::cin >> problems; problems; --problems) {
        std::int64_t problem[MOST_SIZES];
        for (size_t d = 0; d < sizes; ++d) std::cin >> problem[d];
        const Answer a = family.answer(problem, sizes);
        std::printf("%s %d %u %u %u%s\n", a.text ? a.text->c_str() : "ask", a.variant, a.launch.grid[0], a.launch.grid[1], a.launch.grid[2], a.how);
    }
}
