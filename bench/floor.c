// What the machine itself takes for a request and its answer: 32 connections over loopback on one core, a request of 1,200 bytes and an answer of 400,
// by the four calls that nobody gets around (write, read, write, read) and epoll, and nothing else. The generator and mocks of
// `bench overhead` do the same with HTTP, JSON and statistics.
//
//     gcc -O2 -o target/floor bench/floor.c && taskset -c 1 target/floor
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

enum { CONNECTIONS = 32, REQUEST_BYTES = 1200, ANSWER_BYTES = 400, SERVER = 1000 };

static int client[CONNECTIONS], server[CONNECTIONS];
static char buffer[8192];

static void check(int ok, const char *what) {
    if (!ok) {
        perror(what);
        exit(1);
    }
}

static void watch(int epoll, int socket, unsigned long number) {
    int on = 1;
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = number};
    check(setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0, "TCP_NODELAY");
    check(fcntl(socket, F_SETFL, O_NONBLOCK) == 0, "O_NONBLOCK");
    check(epoll_ctl(epoll, EPOLL_CTL_ADD, socket, &event) == 0, "epoll_ctl");
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

int main(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), epoll = epoll_create1(0);
    check(bind(listener, (struct sockaddr *)&address, length) == 0, "bind");
    check(getsockname(listener, (struct sockaddr *)&address, &length) == 0, "getsockname");
    check(listen(listener, CONNECTIONS) == 0, "listen");
    for (int at = 0; at < CONNECTIONS; at++) {
        client[at] = socket(AF_INET, SOCK_STREAM, 0);
        check(connect(client[at], (struct sockaddr *)&address, length) == 0, "connect");
        server[at] = accept(listener, NULL, NULL);
        check(server[at] >= 0, "accept");
        watch(epoll, client[at], at);
        watch(epoll, server[at], SERVER + at);
    }
    for (int at = 0; at < CONNECTIONS; at++) check(write(client[at], buffer, REQUEST_BYTES) > 0, "write");
    double begun = now(), seconds;
    long answered = 0;
    do {
        struct epoll_event events[2 * CONNECTIONS];
        int count = epoll_wait(epoll, events, 2 * CONNECTIONS, 0);
        for (int at = 0; at < count; at++) {
            unsigned long number = events[at].data.u64;
            int is_server = number >= SERVER, socket = is_server ? server[number - SERVER] : client[number];
            if (read(socket, buffer, sizeof buffer) <= 0) continue;
            answered += !is_server;
            check(write(socket, buffer, is_server ? ANSWER_BYTES : REQUEST_BYTES) > 0, "write");
        }
        seconds = now() - begun;
    } while (seconds < 2);
    printf("%.0f requests/s, %.1f us each\n", answered / seconds, seconds * 1e6 / answered);
    return 0;
}
