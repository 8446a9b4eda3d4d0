/* Preloaded into a process that writes a run: keeps a record of what is written to files below $RECORD_BELOW, and of what is asked to
   be on the disk, in the order in which it happens, so that a test can say what a power cut would have left. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static int record = -1;

static void all(const void *data, size_t n) {
    const char *p = data;
    while (n) {
        long done = syscall(SYS_write, record, p, n);
        if (done <= 0) _exit(97);
        p += done; n -= done;
    }
}

static int below(const char *path) {
    const char *place = getenv("RECORD_BELOW");
    return place && !strncmp(path, place, strlen(place)) && strncmp(path + strlen(path) - 4, "-shm", 4);
}

static int path_of(int fd, char *path) {
    char link[64] = "/proc/self/fd/", digits[16];
    int i = 0, k = 14;
    if (fd < 3 || fd == record) return 0;
    do digits[i++] = '0' + fd % 10; while (fd /= 10);
    while (i) link[k++] = digits[--i];
    link[k] = 0;
    long n = syscall(SYS_readlinkat, AT_FDCWD, link, path, 4000);
    if (n <= 0) return 0;
    path[n] = 0;
    return below(path);
}

/* one line of the record: kind, length of the name, offset, length of the data; then name and data */
static void note(char kind, const char *path, int64_t offset, const void *data, uint64_t n) {
    pthread_mutex_lock(&guard);
    if (record < 0) {
        const char *to = getenv("RECORD_TO");
        record = to ? syscall(SYS_openat, AT_FDCWD, to, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    }
    if (record >= 0) {
        uint32_t length = strlen(path);
        char head[21];
        head[0] = kind;
        memcpy(head + 1, &length, 4); memcpy(head + 5, &offset, 8); memcpy(head + 13, &n, 8);
        all(head, 21); all(path, length); all(data, n);
    }
    pthread_mutex_unlock(&guard);
}

static void whole(char kind, int fd, const char *path) {
    struct stat facts;
    if (fstat(fd, &facts) || S_ISDIR(facts.st_mode)) { note('d', path, 0, "", 0); return; }
    char *data = malloc(facts.st_size + 1);
    int own = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    int64_t n = 0, more;
    /* a second descriptor would let go the locks of SQLite when it is closed, so it stays open */
    if (own < 0) { free(data); return; }
    while (n < facts.st_size && (more = syscall(SYS_pread64, own, data + n, facts.st_size - n, n)) > 0) n += more;
    note(kind, path, 0, data, n);
    free(data);
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t n) {
    REAL(write);
    char path[4097];
    int64_t offset = path_of(fd, path) ? lseek(fd, 0, SEEK_CUR) : -1;
    ssize_t done = real(fd, data, n);
    if (offset >= 0 && done > 0) note('w', path, offset, data, done);
    return done;
}

static void placed(int fd, const void *data, ssize_t done, int64_t offset) {
    char path[4097];
    if (done > 0 && path_of(fd, path)) note('w', path, offset, data, done);
}

ssize_t pwrite(int fd, const void *data, size_t n, off_t offset) {
    REAL(pwrite);
    ssize_t done = real(fd, data, n, offset);
    placed(fd, data, done, offset);
    return done;
}

ssize_t pwrite64(int fd, const void *data, size_t n, off64_t offset) {
    REAL(pwrite64);
    ssize_t done = real(fd, data, n, offset);
    placed(fd, data, done, offset);
    return done;
}

static void shortened(int fd, int64_t n) {
    char path[4097];
    if (path_of(fd, path)) note('t', path, n, "", 0);
}

int ftruncate(int fd, off_t n) { REAL(ftruncate); int r = real(fd, n); if (!r) shortened(fd, n); return r; }
int ftruncate64(int fd, off64_t n) { REAL(ftruncate64); int r = real(fd, n); if (!r) shortened(fd, n); return r; }

static void flushed(int fd) {
    char path[4097];
    if (path_of(fd, path)) whole('s', fd, path);
}

int fsync(int fd) { REAL(fsync); int r = real(fd); if (!r) flushed(fd); return r; }
int fdatasync(int fd) { REAL(fdatasync); int r = real(fd); if (!r) flushed(fd); return r; }

/* a name in a folder that is held open, as a whole path */
static const char *at(int folder, const char *name, char *path) {
    if (*name == '/' || folder == AT_FDCWD) return name;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    long n = syscall(SYS_readlinkat, AT_FDCWD, link, path, 4000);
    if (n <= 0) return name;
    path[n] = '/';
    strcpy(path + n + 1, name);
    return path;
}

int unlink(const char *path) { REAL(unlink); int r = real(path); if (!r && below(path)) note('u', path, 0, "", 0); return r; }
int unlinkat(int folder, const char *name, int flags) {
    REAL(unlinkat);
    char path[8200];
    const char *gone = at(folder, name, path);
    int r = real(folder, name, flags);
    if (!r && below(gone)) note('u', gone, 0, "", 0);
    return r;
}

static void given(char kind, const char *from, const char *to) {
    if (below(from)) note(kind, from, 0, to, strlen(to));
}

int rename(const char *from, const char *to) { REAL(rename); int r = real(from, to); if (!r) given('r', from, to); return r; }
int renameat(int a, const char *from, int b, const char *to) {
    REAL(renameat);
    char one[8200], other[8200];
    int r = real(a, from, b, to);
    if (!r) given('r', at(a, from, one), at(b, to, other));
    return r;
}
int linkat(int a, const char *from, int b, const char *to, int flags) {
    REAL(linkat);
    char one[8200], other[8200];
    int r = real(a, from, b, to, flags);
    if (!r) given('l', at(a, from, one), at(b, to, other));
    return r;
}
