// The thread team: every id runs once, barriers separate phases, tickets are handed out once, idle threads park and use
// no CPU, threads stay on the processors they are given.
#include "cpu/pool.h"

#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "affinity.h"
#include "check.h"

using tinyloop::cpu::Pool;

namespace {

void test_phases() {
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
}

struct Member {
    long thread = 0;
    clockid_t clock = 0;  // its CPU time
};

std::vector<Member> members_of(Pool& pool) {
    std::vector<Member> out(static_cast<size_t>(pool.threads()));
    std::vector<int> failed(out.size(), -1);
    pool.run([&](int id) {
        out[static_cast<size_t>(id)].thread = syscall(SYS_gettid);
        failed[static_cast<size_t>(id)] = pthread_getcpuclockid(pthread_self(), &out[static_cast<size_t>(id)].clock);
    });
    for (const int status : failed) CHECK(status == 0);
    return out;
}

int64_t nanoseconds(clockid_t clock) {
    timespec t{};
    clock_gettime(clock, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

bool sleeps(long thread) {
    std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
    std::string line;
    std::getline(file, line);
    return line.compare(line.rfind(')') + 2, 1, "S") == 0;
}

// After a call the members sleep, and do not wake by themselves while the calling thread works.
void test_idle_members_use_no_cpu() {
    Pool pool(3);
    const std::vector<Member> members = members_of(pool);
    // A member may be seen asleep just before its last yields: it sleeps for good once its clock stands still.
    std::vector<int64_t> before(members.size(), -1);
    for (size_t i = 1; i < members.size(); ++i)
        while (!sleeps(members[i].thread) || before[i] != nanoseconds(members[i].clock)) {
            before[i] = nanoseconds(members[i].clock);
            sched_yield();
        }
    for (const int64_t until = nanoseconds(CLOCK_THREAD_CPUTIME_ID) + 50'000'000;
         nanoseconds(CLOCK_THREAD_CPUTIME_ID) < until;) {
    }
    for (size_t i = 1; i < members.size(); ++i) CHECK(nanoseconds(members[i].clock) == before[i]);
    int ran[3] = {};
    pool.run([&](int id) { ++ran[id]; });  // and they wake when there is work
    CHECK(ran[0] == 1 && ran[1] == 1 && ran[2] == 1);
}

cpu_set_t mask_of(long thread) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CHECK(sched_getaffinity(static_cast<pid_t>(thread), sizeof set, &set) == 0);
    return set;
}

void test_members_stay_where_they_are_put() {
    const std::vector<int> allowed = tinyloop::allowed_cpus();
    const cpu_set_t ours = mask_of(0);
    const int32_t first = allowed.front(), last = allowed.back();
    const int32_t cpus[] = {first, last, first};
    Pool pinned(3, cpus), free(3);
    const std::vector<Member> placed = members_of(pinned);
    for (int id = 1; id < 3; ++id) {
        const cpu_set_t mask = mask_of(placed[static_cast<size_t>(id)].thread);
        CHECK(CPU_COUNT(&mask) == 1 && CPU_ISSET(static_cast<size_t>(cpus[id]), &mask));
    }
    for (const Member& member : members_of(free)) {
        const cpu_set_t mask = mask_of(member.thread);
        CHECK(CPU_EQUAL(&mask, &ours));
    }
    const cpu_set_t after = mask_of(0);
    CHECK(CPU_EQUAL(&after, &ours));  // the caller is not moved
}

}  // namespace

int main() {
    test_phases();
    test_idle_members_use_no_cpu();
    test_members_stay_where_they_are_put();
    return finish();
}
