/* One connection to a server that speaks the Redis protocol (RESP2), for one receiving thread. The control plane has
 * connected it and logged in. Only GET is asked, several at a time, and answered in order. store/resp.py has the rest of
 * the protocol. */
#include "plane.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define IN_BYTES (64 << 10)
/* Values from this size on are received straight to where they belong, but for what came with their first line. */
#define LARGE_BYTES (16 << 10)
#define FIRST_BYTES 512

struct connection *new_connection(struct session *session, uint32_t node, int fd)
{
    struct connection *connection = calloc(1, sizeof *connection);
    if (!connection || !(connection->in = malloc(IN_BYTES))) {
        free(connection);
        return NULL;
    }
    connection->session = session;
    connection->node = node;
    connection->fd = fd;
    return connection;
}

void free_connection(struct connection *connection)
{
    close(connection->fd);
    free(connection->in);
    free(connection->out);
    free(connection);
}

bool has_unasked(const struct connection *connection)
{
    uint8_t byte;
    return !connection->num_asked && (connection->start < connection->end ||
                                      recv(connection->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0);
}

void ask_piece(struct connection *connection, const struct fetch *fetch, uint32_t block, uint32_t index)
{
    const struct session *session = fetch->session;
    if (!connection->num_asked)
        connection->deadline = now() + session->timeout_s;
    char name[MAX_PREFIX_BYTES + 2 * KEY_BYTES + 16], ttl[16];
    int size = snprintf(name, sizeof name, "%s", session->prefix);
    for (int i = 0; i < KEY_BYTES; i++)
        size += snprintf(name + size, sizeof name - (size_t)size, "%02x", fetch->keys[block * (size_t)KEY_BYTES + (size_t)i]);
    size += snprintf(name + size, sizeof name - (size_t)size, "}:%u", index);
    if (connection->out_room - connection->out_bytes < sizeof name + 64) {
        connection->out_room = 2 * connection->out_room + 1024;
        connection->out = realloc(connection->out, connection->out_room);
        if (!connection->out)
            abort();
    }
    char *out = (char *)connection->out + connection->out_bytes;
    size_t room = connection->out_room - connection->out_bytes;
    if (session->ttl_s) {
        int digits = snprintf(ttl, sizeof ttl, "%u", session->ttl_s);
        connection->out_bytes += (size_t)snprintf(out, room, "*4\r\n$5\r\nGETEX\r\n$%d\r\n%s\r\n$2\r\nEX\r\n$%d\r\n%s\r\n",
                                                  size, name, digits, ttl);
    } else
        connection->out_bytes += (size_t)snprintf(out, room, "*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n", size, name);
    connection->num_asked++;
}

static enum reply failure(int error, int *to)
{
    *to = error;
    if (error == EAGAIN || error == EWOULDBLOCK || error == ETIMEDOUT)
        return TIMED_OUT;
    return SYSTEM_ERROR;
}

enum reply send_asked(struct connection *connection, int *error)
{
    size_t at = 0;
    while (at < connection->out_bytes) {
        ssize_t sent = send(connection->fd, connection->out + at, connection->out_bytes - at, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0) {
            at += (size_t)sent;
            continue;
        }
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            return failure(errno, error);
        double left = connection->deadline - now();
        struct pollfd waiting = {connection->fd, POLLOUT, 0};
        if (left <= 0 || poll(&waiting, 1, (int)(left * 1000) + 1) == 0)
            return failure(ETIMEDOUT, error);
    }
    connection->out_bytes = 0;
    return VALUE;
}

/* At least one byte to out, until the deadline. The kernel counts the timeout down over the whole call, even where it waits several times;
 * so a value ends in time however slowly its bytes come. */
static enum reply receive(struct connection *connection, uint8_t *out, size_t room, bool wait_all, size_t *got,
                          int *error)
{
    double left = connection->deadline - now();
    if (left <= 0)
        return failure(ETIMEDOUT, error);
    struct timeval limit = {(time_t)left, (suseconds_t)((left - (double)(time_t)left) * 1e6) + 1};
    if (limit.tv_usec > 999999)
        limit.tv_usec = 999999;
    setsockopt(connection->fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    for (;;) {
        ssize_t n = recv(connection->fd, out, room, wait_all ? MSG_WAITALL : 0);
        if (n > 0) {
            *got = (size_t)n;
            return VALUE;
        }
        if (n == 0)
            return CLOSED;
        if (errno != EINTR)
            return failure(errno, error);
    }
}

/* Room bytes to out, or dropped where out is NULL. */
static enum reply take(struct connection *connection, uint8_t *out, size_t size, int *error)
{
    while (size) {
        size_t here = connection->end - connection->start, got = 0;
        if (here) {
            got = here < size ? here : size;
            if (out)
                memcpy(out, connection->in + connection->start, got);
            connection->start += got;
        } else if (out && size >= LARGE_BYTES) {
            enum reply reply = receive(connection, out, size, true, &got, error);
            if (reply != VALUE)
                return reply;
        } else {
            connection->start = connection->end = 0;
            enum reply reply = receive(connection, connection->in, IN_BYTES, false, &connection->end, error);
            if (reply != VALUE)
                return reply;
            continue;
        }
        size -= got;
        out = out ? out + got : NULL;
    }
    return VALUE;
}

static void answered(struct connection *connection)
{
    connection->num_asked--;
    connection->has_answered = true;
    connection->deadline = now() + connection->session->timeout_s;
}

/* A line without its end, at most room - 1 bytes of it. */
static enum reply take_line(struct connection *connection, char *line, size_t room, int *error)
{
    size_t size = 0;
    for (;;) {
        if (connection->start == connection->end) {
            connection->start = connection->end = 0;
            /* Little, so that most of a large value is not copied twice. */
            enum reply reply =
                receive(connection, connection->in, FIRST_BYTES, false, &connection->end, error);
            if (reply != VALUE)
                return reply;
        }
        char byte = (char)connection->in[connection->start++];
        if (byte == '\n' && size && line[size - 1] == '\r') {
            line[size - 1] = 0;
            return VALUE;
        }
        if (size == room - 1) {
            line[size] = 0;
            return NOT_A_REPLY;
        }
        line[size++] = byte;
    }
}

enum reply receive_value(struct connection *connection, const struct area *areas, int num_areas, size_t *size,
                         char text[REASON_BYTES], int *error)
{
    char line[4096], *end;
    enum reply reply = take_line(connection, line, sizeof line, error);
    if (reply == NOT_A_REPLY)
        snprintf(text, REASON_BYTES, "%.20s", line);
    if (reply != VALUE)
        return reply;
    if (line[0] == '-') {
        answered(connection);
        snprintf(text, REASON_BYTES, "%.*s", REASON_BYTES - 1, line + 1);
        if (!strncmp(line, "-READONLY", 9)) /* perhaps another server is the master now */
            return NOT_THE_MASTER;
        return !strncmp(line, "-MOVED ", 7) || !strncmp(line, "-ASK ", 5) ? REDIRECTED : ERROR_REPLY;
    }
    errno = 0;
    long long length = line[0] == '$' && line[1] ? strtoll(line + 1, &end, 10) : -2;
    if (length < -1 || *end || errno || length > 512 << 20) {
        snprintf(text, REASON_BYTES, "%.20s", line);
        return NOT_A_REPLY;
    }
    if (length == -1) {
        answered(connection);
        return NONE;
    }
    size_t room = 0, left = (size_t)length;
    for (int i = 0; i < num_areas; i++)
        room += areas[i].size;
    bool fits = left <= room;
    for (int i = 0; fits && i < num_areas && left; i++) {
        size_t here = areas[i].size < left ? areas[i].size : left;
        if ((reply = take(connection, areas[i].memory, here, error)) != VALUE)
            return reply;
        left -= here;
    }
    uint8_t line_end[2];
    if ((reply = take(connection, NULL, left, error)) != VALUE ||
        (reply = take(connection, line_end, 2, error)) != VALUE)
        return reply;
    if (memcmp(line_end, "\r\n", 2)) {
        snprintf(text, REASON_BYTES, "a value that is longer than the announced length");
        return NOT_A_REPLY;
    }
    answered(connection);
    *size = (size_t)length;
    return fits ? VALUE : TOO_LARGE;
}
