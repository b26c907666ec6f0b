// A lock that a thread awaits actively for a moment before it sleeps: see adaptive_lock.py.
//
// It wraps the lock that Python offers to extensions, so sleeping threads take signals as usual.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// How long a thread that has the lock looks whether the global lock is free before it asks for it.
constexpr Seconds LONGEST_LOOK{50e-6};
// A thread that frees a tensor releases the global lock for less than this.
constexpr Seconds SHORT_RELEASE{3e-6};

struct Lock {
  PyObject_HEAD
  PyThread_type_lock lock;
  Seconds active;  // how long a thread waits before it sleeps
  bool is_locked;  // protected by the global lock
};

void pause_processor() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Wait without the global lock until the lock is acquired, and return whether it is.
//
// The thread that is to release it may be on the same core, if others occupy the rest: it goes first.
bool acquired_actively(PyThread_type_lock lock, Seconds longest) {
  const auto begun = Clock::now();
  do {
    for (int tries = 0; tries < 64; ++tries) {
      if (PyThread_acquire_lock(lock, NOWAIT_LOCK)) return true;
      pause_processor();
    }
    std::this_thread::yield();
  } while (Clock::now() - begun < longest);
  return false;
}

// Wait a moment while another thread has the global lock: a thread that asks for it in vain sleeps,
// and is woken late. Other versions of Python do not tell who has it.
void await_global_lock() {
#if PY_VERSION_HEX < 0x030C0000
  const auto begun = Clock::now();
  auto free_since = begun;
  for (auto now = begun; now - begun < LONGEST_LOOK; now = Clock::now()) {
    if (_PyThreadState_UncheckedGet() != nullptr) free_since = now;
    else if (now - free_since > SHORT_RELEASE) return;
    pause_processor();
  }
#endif
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* /* no keywords */) {
  double active;
  if (!PyArg_ParseTuple(args, "d", &active)) return nullptr;
  auto* self = reinterpret_cast<Lock*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->lock = PyThread_allocate_lock();
  self->active = Seconds(active);
  self->is_locked = false;
  if (self->lock == nullptr) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  return reinterpret_cast<PyObject*>(self);
}

void destroy(Lock* self) {
  if (self->lock != nullptr) {
    if (self->is_locked) PyThread_release_lock(self->lock);
    PyThread_free_lock(self->lock);
  }
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* acquire(Lock* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"blocking", "timeout", nullptr};
  int blocking = 1;
  double timeout = -1;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "|pd", const_cast<char**>(names), &blocking, &timeout))
    return nullptr;
  const bool is_limited = timeout != -1;
  if (is_limited && !blocking) {
    PyErr_SetString(PyExc_ValueError, "can't specify a timeout for a non-blocking call");
    return nullptr;
  }
  if (is_limited && !(timeout >= 0)) {
    PyErr_SetString(PyExc_ValueError, "timeout value must be a non-negative number");
    return nullptr;
  }
  bool has_lock = PyThread_acquire_lock(self->lock, NOWAIT_LOCK);
  if (!has_lock && blocking) {
    const auto begun = Clock::now();
    const auto active = is_limited ? std::min(self->active, Seconds(timeout)) : self->active;
    // 1. Wait actively.
    if (active.count() > 0) {
      Py_BEGIN_ALLOW_THREADS
      has_lock = acquired_actively(self->lock, active);
      if (has_lock) await_global_lock();
      Py_END_ALLOW_THREADS
    }
    // A signal that came meanwhile, or just before, wakes nobody.
    if (!has_lock && PyErr_CheckSignals() < 0) return nullptr;
    // 2. Sleep, until a signal, the end of the time, or another thread wakes this one.
    while (!has_lock) {
      PY_TIMEOUT_T left = -1;
      if (is_limited) {
        const Seconds rest = Seconds(timeout) - (Clock::now() - begun);
        left = static_cast<PY_TIMEOUT_T>(
            std::clamp(rest.count() * 1e6, 0.0, static_cast<double>(PY_TIMEOUT_MAX)));
      }
      PyLockStatus status;
      Py_BEGIN_ALLOW_THREADS
      status = PyThread_acquire_lock_timed(self->lock, left, 1);
      Py_END_ALLOW_THREADS
      if (status == PY_LOCK_INTR && PyErr_CheckSignals() < 0) return nullptr;
      if (status == PY_LOCK_FAILURE) break;
      has_lock = status == PY_LOCK_ACQUIRED;
    }
  }
  if (has_lock) self->is_locked = true;
  return PyBool_FromLong(has_lock);
}

PyObject* release(Lock* self, PyObject*) {
  if (!self->is_locked) {
    PyErr_SetString(PyExc_RuntimeError, "release unlocked lock");
    return nullptr;
  }
  self->is_locked = false;
  PyThread_release_lock(self->lock);
  Py_RETURN_NONE;
}

PyObject* locked(Lock* self, PyObject*) { return PyBool_FromLong(self->is_locked); }

PyMethodDef LOCK_METHODS[] = {
    {"acquire", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(acquire)),
     METH_VARARGS | METH_KEYWORDS, nullptr},
    {"release", reinterpret_cast<PyCFunction>(release), METH_NOARGS, nullptr},
    {"locked", reinterpret_cast<PyCFunction>(locked), METH_NOARGS, nullptr},
    {}};

PyObject* get_active(Lock* self, void*) { return PyFloat_FromDouble(self->active.count()); }

PyGetSetDef LOCK_ATTRIBUTES[] = {
    {"active", reinterpret_cast<getter>(get_active), nullptr, "seconds of active waiting", nullptr},
    {}};

PyType_Slot SLOTS[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, LOCK_METHODS},
    {Py_tp_getset, LOCK_ATTRIBUTES},
    {}};

PyType_Spec SPEC = {"autosched.AdaptiveLock", sizeof(Lock), 0, Py_TPFLAGS_DEFAULT, SLOTS};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "adaptive_lock", nullptr, -1, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_adaptive_lock() {
  PyObject* type = PyType_FromSpec(&SPEC);
  if (type == nullptr) return nullptr;
  PyObject* module = PyModule_Create(&MODULE);
  if (module == nullptr || PyModule_AddObject(module, "Lock", type) < 0) {
    Py_DECREF(type);
    Py_XDECREF(module);
    return nullptr;
  }
  return module;
}
