// The only process of the emulated machine: runs the programs that the kernel's command line names, one after another,
// each with the argument "avx512", and says on the serial line how each ended. It must not know what they test.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

int main(int count, char** arguments) {
    for (int i = 1; i < count; ++i) {
        const char* program = arguments[i];
        if (program[0] != '/') continue;  // an option that the kernel passes on
        std::printf("init: start %s\n", program);
        std::fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
            execl(program, program, "avx512", static_cast<char*>(nullptr));
            _exit(127);
        }
        int status = -1;
        if (child > 0) waitpid(child, &status, 0);
        std::printf("init: end %s %d\n", program, status);
    }
    std::printf("init: done\n");
    std::fflush(stdout);
    for (;;) pause();
}
