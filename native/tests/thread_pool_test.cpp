// The thread team: every id runs once, barriers separate phases, tickets are handed out once, idle threads stop
// cleanly.
#include "cpu/pool.h"

#include <vector>

#include "check.h"

using tinyloop::cpu::Pool;

int main() {
    for (const int threads : {1, 2, 4, 7}) {
        Pool pool(threads);
        std::vector<int> left(threads), right(threads), taken(1000);
        for (int round = 0; round < 200; ++round) {
            pool.run([&](int id) {
                left[id] = round;
                pool.barrier();
                int sum = 0;
                for (const int value : left) sum += value;  // reads what the others wrote before the barrier
                right[id] = sum;
                if (id == 0) pool.reset_next();
                pool.barrier();
                for (int ticket = pool.next(); ticket < 1000; ticket = pool.next()) ++taken[ticket];
            });
            for (const int sum : right) CHECK(sum == round * threads);
        }
        for (const int count : taken) CHECK(count == 200);
    }
    return finish();
}
