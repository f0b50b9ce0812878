/* The data plane as a program without Python: kvplane FD, a socket to its control plane. */
#include "plane.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>

int main(int argc, char **argv)
{
    char *end = NULL;
    long fd = argc == 2 ? strtol(argv[1], &end, 10) : -1;
    if (fd < 0 || *end) {
        fprintf(stderr, "usage: kvplane FD\nThe offload proxy starts it, with a connected socket as descriptor FD.\n");
        return 2;
    }
    /* It ends with its control plane, also while it is stopped: an engine waits for the end of both. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    return kvplane_run((int)fd, true);
}
