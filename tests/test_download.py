"Downloads from a server that misbehaves, archives that attack, processes that die"
import gzip, hashlib, http.server, io, os, signal, socket, stat, subprocess, sys, tarfile, textwrap, threading, time, zipfile
from pathlib import Path

import pytest

from fastbench.machine.download import DataUnavailable, UnsafeArchive, build_folder, cache_dir, fetch, unpack
from fastbench.errors import UserError

BODY = bytes(range(256))*4000
SHA = hashlib.sha256(BODY).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.hits += 1
        if self.path == '/gone': return self.send_error(404)
        if self.path == '/slow': time.sleep(3)
        if self.path == '/redirect':
            self.send_response(302); self.send_header('Location', '/file'); self.end_headers()
            return
        self.send_response(200)
        if self.path != '/nolength': self.send_header('Content-Length', str(len(BODY)))
        self.end_headers()
        if self.path == '/stall': self.wfile.write(BODY[:1000]); self.wfile.flush(); self.server.over.wait(600); return
        try: self.wfile.write(BODY[:len(BODY)//2] if self.path in ('/half', '/nolength') else BODY)
        except OSError: pass
    def log_message(self, *args): pass


@pytest.fixture(scope='module')
def server():
    s = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    s.hits,s.daemon_threads,s.over = 0,True,threading.Event()
    threading.Thread(target=s.serve_forever, daemon=True).start()
    s.url = f'http://127.0.0.1:{s.server_port}'
    yield s
    s.over.set()
    s.shutdown()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for o in 'http_proxy', 'https_proxy', 'all_proxy', 'HTTP_PROXY', 'HTTPS_PROXY', 'ALL_PROXY': monkeypatch.delenv(o, raising=False)


def files(d): return sorted(o.name for o in Path(d).iterdir() if o.suffix != '.lock')

def one_line(e): assert '\n' not in str(e.value); return str(e.value)


@pytest.mark.parametrize('path', ['/file', '/redirect'])
def test_fetch(server, tmp_path, path):
    seen = []
    got = fetch(server.url+path, tmp_path/'new'/'x.bin', sha256=SHA, md5=hashlib.md5(BODY).hexdigest(), size=len(BODY),
                md5_start=hashlib.md5(BODY[:1<<20]).hexdigest(), tell=lambda n, total: seen.append((n, total)))
    assert got.read_bytes() == BODY and files(got.parent) == ['x.bin'] and seen[-1] == (len(BODY), len(BODY))
    assert stat.S_IMODE(got.stat().st_mode) & 0o444 == 0o444


def test_a_right_file_is_not_fetched_again_and_a_wrong_one_is(server, tmp_path):
    (tmp_path/'x').write_bytes(BODY)
    n = server.hits
    fetch(server.url+'/file', tmp_path/'x', sha256=SHA)
    assert server.hits == n
    (tmp_path/'x').write_bytes(BODY[:-1]+b'!')
    assert fetch(server.url+'/file', tmp_path/'x', sha256=SHA).read_bytes() == BODY
    assert server.hits == n+1


@pytest.mark.parametrize('path,kwargs,says', [
    ('/gone', {}, 'answered 404'),
    ('/half', {}, 'the connection ended after 512,000 of 1,024,000 bytes'),
    ('/nolength', dict(size=len(BODY)), 'the connection ended after 512,000 of 1,024,000 bytes'),
    ('/nolength', dict(sha256=SHA), 'what came is not the published file: its sha256 is'),
    ('/file', dict(sha256='0'*64), 'instead of 000000'),
    ('/file', dict(md5_start='0'*32), 'its md5 of the first megabyte is'),
    ('/file', dict(size=5), 'it has 1,024,000 bytes instead of 5'),
    ('/slow', dict(timeout=.3), 'did not answer within 0.3 s'),
    ('/stall', dict(timeout=.3), 'did not answer within 0.3 s')])
def test_each_fault_is_one_line_and_leaves_nothing(server, tmp_path, path, kwargs, says):
    with pytest.raises(DataUnavailable) as e: fetch(server.url+path, tmp_path/'x.tgz', hint="data='photos' works offline", **kwargs)
    msg = one_line(e)
    assert says in msg and msg.endswith("data='photos' works offline") and 'x.tgz' in msg and server.url in msg
    assert files(tmp_path) == [] and isinstance(e.value, UserError)


def test_no_name_no_listener_no_scheme(tmp_path, monkeypatch):
    def no_such(*a, **k): raise socket.gaierror(-2, 'Name or service not known')
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0)); port = s.getsockname()[1]
    with pytest.raises(DataUnavailable) as e: fetch(f'http://127.0.0.1:{port}/x', tmp_path/'x')
    assert 'refused the connection' in one_line(e)
    monkeypatch.setattr(socket, 'getaddrinfo', no_such)
    with pytest.raises(DataUnavailable) as e: fetch('http://data.invalid/x', tmp_path/'x')
    assert 'the name data.invalid does not resolve' in one_line(e)
    with pytest.raises(DataUnavailable) as e: fetch('ftp://data.invalid/x', tmp_path/'x')
    assert "'ftp'" in one_line(e)
    assert files(tmp_path) == []


def test_offline_opens_no_socket(server, tmp_path, monkeypatch):
    def never(*a, **k): raise AssertionError('a socket was opened')
    monkeypatch.setattr(socket, 'socket', never)
    monkeypatch.setattr(socket, 'getaddrinfo', never)
    with pytest.raises(DataUnavailable) as e: fetch(server.url+'/file', tmp_path/'x', offline=True)
    assert 'offline, and there is no' in one_line(e)
    (tmp_path/'x').write_bytes(BODY)
    assert fetch(server.url+'/file', tmp_path/'x', sha256=SHA, offline=True).read_bytes() == BODY
    (tmp_path/'x').write_bytes(BODY[1:])
    with pytest.raises(DataUnavailable) as e: fetch(server.url+'/file', tmp_path/'x', size=len(BODY), offline=True)
    assert 'is not the published file' in one_line(e) and (tmp_path/'x').exists()


def test_ctrl_c_leaves_nothing(server, tmp_path):
    def stop(*a): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): fetch(server.url+'/file', tmp_path/'x', tell=stop)
    assert files(tmp_path) == []


@pytest.mark.skipif(os.name == 'nt' or getattr(os, 'geteuid', lambda: 0)() == 0, reason='root may write anywhere')
def test_a_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(DataUnavailable, match='FASTBENCH_HOME'): fetch('file:///x', tmp_path/'a'/'x')


def test_a_path_that_is_no_folder(tmp_path):
    (tmp_path/'f').write_text('')
    with pytest.raises(DataUnavailable, match='FASTBENCH_HOME'): fetch('file:///x', tmp_path/'f'/'a'/'x')


@pytest.mark.skipif(os.name == 'nt', reason='kill -9')
def test_killed_downloads_are_swept_away(server, tmp_path):
    code = f"from fastbench.machine.download import fetch; fetch({server.url+'/stall'!r}, {str(tmp_path/'x')!r})"
    p = subprocess.Popen([sys.executable, '-c', code])
    wait_for(lambda: list(tmp_path.glob('*.part')) or list(tmp_path.glob('.*.part')))
    p.send_signal(signal.SIGKILL); p.wait()
    assert not (tmp_path/'x').exists() and list(tmp_path.glob('.x.*.part'))
    fetch(server.url+'/file', tmp_path/'x', sha256=SHA)
    assert files(tmp_path) == ['x']


def wait_for(f, seconds=120):
    end = time.monotonic()+seconds
    while not f():
        assert time.monotonic() < end, 'it never happened'
        time.sleep(.02)


# --- archives

def member(name, data=b'data', kind=tarfile.REGTYPE, link=''):
    i = tarfile.TarInfo(name)
    i.type,i.linkname,i.size = kind,link,len(data) if kind == tarfile.REGTYPE else 0
    return i, data

def tar(path, *members, mode='w:gz'):
    with tarfile.open(path, mode) as t:
        for i,f in members: t.addfile(i, io.BytesIO(f) if i.isreg() else None)
    return path

GOOD = [member('set/train/cat/1.png', b'one'*999), member('set/val/cat/2.png', b'two'*999)]

@pytest.mark.parametrize('kind', ['gz', 'plain', 'zip', 'unix-compressed-dirs'])
def test_unpack(tmp_path, kind):
    a = tmp_path/'a.bin' # the content decides, not the name
    if kind == 'zip':
        with zipfile.ZipFile(a, 'w', zipfile.ZIP_DEFLATED) as z:
            z.writestr('set/', b'')
            for i,f in GOOD: z.writestr(i.name, f)
    elif kind == 'plain': tar(a, *GOOD, mode='w')
    elif kind == 'gz': tar(a, *GOOD)
    else: tar(a, member('./set/', kind=tarfile.DIRTYPE), *GOOD)
    d = unpack(a, tmp_path/'out'/'set')
    assert sorted(o.relative_to(d).as_posix() for o in d.rglob('*.png')) == ['train/cat/1.png', 'val/cat/2.png']
    assert (d/'train/cat/1.png').read_bytes() == b'one'*999
    assert files(tmp_path/'out') == ['set']


def test_strip_only_a_single_top_folder(tmp_path):
    assert files(unpack(tar(tmp_path/'a', member('train/1'), member('val/2')), tmp_path/'d')) == ['train', 'val']
    assert files(unpack(tar(tmp_path/'b', *GOOD), tmp_path/'e', strip=False)) == ['set']
    assert files(unpack(tar(tmp_path/'c', member('set/set/1')), tmp_path/'f')) == ['set']


ATTACKS = dict(
    up=[member('../evil')], deep=[member('set/../../evil')], absolute=[member('/tmp/fastbench-evil')], backslash=[member('..\\evil')],
    drive=[member('C:\\evil')], symlink=[member('set/l', kind=tarfile.SYMTYPE, link='../..'), member('set/l/evil')],
    hardlink=[member('set/l', kind=tarfile.LNKTYPE, link='/etc/passwd')], device=[member('set/d', kind=tarfile.CHRTYPE)],
    fifo=[member('set/p', kind=tarfile.FIFOTYPE)], inside=[member('set/l', kind=tarfile.SYMTYPE, link='1')])

@pytest.mark.parametrize('name', ATTACKS)
@pytest.mark.parametrize('mode', ['w', 'w:gz'])
def test_members_that_leave_the_folder_are_refused_by_name(tmp_path, name, mode):
    (tmp_path/'in').mkdir()
    a = tar(tmp_path/'evil.tgz', member('set/first'), *ATTACKS[name], mode=mode)
    with pytest.raises(UnsafeArchive) as e: unpack(a, tmp_path/'in'/'set')
    assert repr(ATTACKS[name][0][0].name) in one_line(e) and 'Nothing was unpacked' in str(e.value) and 'evil.tgz' in str(e.value)
    assert files(tmp_path/'in') == [] and files(tmp_path) == ['evil.tgz', 'in'] and not Path('/tmp/fastbench-evil').exists()


@pytest.mark.parametrize('name,mode', [('../evil', 0), ('/evil', 0), ('..\\evil', 0), ('set/l', stat.S_IFLNK), ('set/p', stat.S_IFIFO)])
def test_zip_members_too(tmp_path, name, mode):
    with zipfile.ZipFile(tmp_path/'evil.zip', 'w') as z:
        z.writestr('set/first', 'x')
        i = zipfile.ZipInfo(name); i.external_attr = mode<<16
        z.writestr(i, '/etc')
    with pytest.raises(UnsafeArchive): unpack(tmp_path/'evil.zip', tmp_path/'set')
    assert files(tmp_path) == ['evil.zip']


def test_without_tarfiles_own_filter(tmp_path, monkeypatch):
    "The refusal is ours: Python 3.10.0 has no `data_filter`"
    for o in 'data_filter', 'tar_filter', 'fully_trusted_filter': monkeypatch.delattr(tarfile, o, raising=False)
    def never(*a, **k): raise AssertionError('extract was used')
    for o in 'extract', 'extractall': monkeypatch.setattr(tarfile.TarFile, o, never)
    with pytest.raises(UnsafeArchive): unpack(tar(tmp_path/'e', member('../evil')), tmp_path/'d')
    assert unpack(tar(tmp_path/'g', *GOOD), tmp_path/'d').is_dir()


@pytest.mark.parametrize('mode', ['w', 'w:gz', 'zip'])
@pytest.mark.parametrize('cut', [.02, .3, .6, .9, .98])
def test_truncated_anywhere(tmp_path, mode, cut):
    import random
    big = [member(f'set/{i}', random.Random(i).randbytes(5000)) for i in range(20)]
    a = tmp_path/'a'
    if mode == 'zip':
        with zipfile.ZipFile(a, 'w') as z:
            for i,f in big: z.writestr(i.name, f)
    else: tar(a, *big, mode=mode)
    data = a.read_bytes()
    end = len(data) if mode != 'w' else len(data.rstrip(b'\0'))
    a.write_bytes(data[:int(end*cut)])
    with pytest.raises(DataUnavailable) as e: unpack(a, tmp_path/'set')
    assert 'truncated or damaged' in one_line(e) and files(tmp_path) == ['a']


def test_a_tar_cut_between_two_members(tmp_path):
    a = tar(tmp_path/'a', member('set/1', b'x'*512), member('set/2', b'y'*512), mode='w')
    a.write_bytes(a.read_bytes()[:1024]) # header and data of the first: tarfile itself is content
    with pytest.raises(DataUnavailable, match='end mark'): unpack(a, tmp_path/'set')
    a.write_bytes(gzip.compress(a.read_bytes()))
    with pytest.raises(DataUnavailable, match='end mark'): unpack(a, tmp_path/'set')


@pytest.mark.parametrize('mode', ['w:gz', 'zip'])
def test_one_altered_byte_anywhere(tmp_path, mode):
    import random
    a,payload = tmp_path/'a',random.Random(0).randbytes(3000)
    if mode == 'zip':
        with zipfile.ZipFile(a, 'w', zipfile.ZIP_DEFLATED) as z: z.writestr('set/1', payload)
        spots = range(60, 3000, 300)
    else: spots = [*range(400, 3000, 300), -6, -2] # the last: gzip's checksum and length, which tarfile never reads
    if mode == 'w:gz': tar(a, member('set/1', payload))
    data = a.read_bytes()
    for i in spots:
        b = bytearray(data); b[i] ^= 0x10
        a.write_bytes(b)
        with pytest.raises(DataUnavailable): unpack(a, tmp_path/'set')
        assert files(tmp_path) == ['a'], i


def test_no_archive_at_all(tmp_path):
    (tmp_path/'a').write_text('<html>Sign in to the hotel network</html>'*100)
    with pytest.raises(DataUnavailable, match='is not an archive'): unpack(tmp_path/'a', tmp_path/'set')
    with pytest.raises(DataUnavailable, match='none is not there'): unpack(tmp_path/'none', tmp_path/'set')


def test_a_file_where_a_folder_should_be(tmp_path):
    with pytest.raises(DataUnavailable, match='truncated or damaged'): unpack(tar(tmp_path/'a', member('s/x'), member('s/x/y')), tmp_path/'d')
    assert files(tmp_path) == ['a']


@pytest.mark.skipif(os.name == 'nt', reason='kill -9')
def test_killed_unpacking_leaves_nothing_that_looks_complete(tmp_path):
    code = textwrap.dedent(f'''
        import time
        from pathlib import Path
        from fastbench.machine.download import build_folder
        def fill(tmp): (tmp/'half').write_text('x'); time.sleep(600)
        build_folder({str(tmp_path/'set')!r}, fill)''')
    p = subprocess.Popen([sys.executable, '-c', code])
    wait_for(lambda: list(tmp_path.glob('.set.*.tmp/half')))
    p.send_signal(signal.SIGKILL); p.wait()
    assert files(tmp_path) != ['set'] and not (tmp_path/'set').exists()
    unpack(tar(tmp_path/'a', *GOOD), tmp_path/'set') # the lock died with its holder
    assert files(tmp_path) == ['a', 'set']


def test_two_processes_build_once(tmp_path):
    code = textwrap.dedent(f'''
        import time
        from fastbench.machine.download import build_folder
        def fill(tmp): time.sleep(.5); (tmp/'x').write_text('x')
        print(build_folder({str(tmp_path/'set')!r}, fill))''')
    ps = [subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert sorted(p.communicate()[0].strip() for p in ps) == ['False', 'False', 'True']
    assert files(tmp_path) == ['set']


def test_redo_replaces_and_a_failed_redo_keeps(tmp_path):
    def write(text): return lambda tmp: (tmp/'x').write_text(text)
    build_folder(tmp_path/'s', write('1'))
    def fail(tmp): (tmp/'x').write_text('2'); raise RuntimeError
    with pytest.raises(RuntimeError): build_folder(tmp_path/'s', fail, redo=True)
    assert (tmp_path/'s/x').read_text() == '1'
    assert build_folder(tmp_path/'s', write('3'), redo=True) and (tmp_path/'s/x').read_text() == '3'
    assert files(tmp_path) == ['s']


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv('FASTBENCH_HOME', str(tmp_path/'h'))
    assert cache_dir() == tmp_path/'h' and not (tmp_path/'h').exists()
    monkeypatch.delenv('FASTBENCH_HOME')
    if sys.platform.startswith('linux'):
        monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
        assert cache_dir() == tmp_path/'fastbench'
        monkeypatch.setenv('XDG_CACHE_HOME', 'relative')
        assert cache_dir() == Path.home()/'.cache/fastbench'


@pytest.mark.skipif(os.name == 'nt', reason='HOME and users of POSIX')
def test_a_user_without_a_home_is_told_in_one_line(monkeypatch):
    import pwd
    def nobody(*args): raise KeyError('no such user')
    monkeypatch.setattr(pwd, 'getpwuid', nobody)
    for o in 'HOME', 'FASTBENCH_HOME', 'XDG_CACHE_HOME': monkeypatch.delenv(o, raising=False)
    with pytest.raises(DataUnavailable, match='HOME is not set.*Set FASTBENCH_HOME') as e: cache_dir()
    one_line(e)
    from fastbench.draw import fastest
    monkeypatch.setattr(fastest, 'time_decoders', lambda **kwargs: dict(pillow=100))
    monkeypatch.setattr(fastest, '_measured', {})
    assert fastest.choose_decoder().decoder.name == 'pillow', 'nothing can be kept, and it is measured all the same'
    from fastbench.compare.doctor import _cache_rows
    assert [o['value'] for o in _cache_rows() if 'HOME is not set' in o['note']] == ['nowhere']


def test_a_lock_that_cannot_be_opened_says_whose_and_why(tmp_path, monkeypatch):
    from fastbench.machine import download
    def deny(kind):
        def open(*args): raise kind
        monkeypatch.setattr(download, 'open', open, raising=False)
    (tmp_path/'.x.lock').touch()
    deny(PermissionError(13, 'Permission denied'))
    with pytest.raises(DataUnavailable, match='another user made: Permission denied') as e: build_folder(tmp_path/'x', lambda o: None)
    deny(OSError(30, 'Read-only file system'))
    with pytest.raises(DataUnavailable, match='cannot write in the folder .*: Read-only file system') as e: build_folder(tmp_path/'x', lambda o: None)
    one_line(e)


@pytest.mark.skipif(os.name == 'nt', reason='Windows removes no file that is open')
def test_a_lock_that_is_removed_while_one_waits_for_it_is_taken_anew(tmp_path, monkeypatch):
    "Else the next one would make a file of that name and hold it, too"
    from fastbench.machine import download
    path, opened, seen, real = tmp_path/'.x.lock', threading.Event(), [], download._lock
    def lock(f, on):
        if threading.current_thread() is waiting: opened.set()
        return real(f, on)
    def enter():
        with download.locked(path): seen.append(path.exists())
    waiting = threading.Thread(target=enter, daemon=True)
    monkeypatch.setattr(download, '_lock', lock)
    with download.locked(path):
        waiting.start()
        assert opened.wait(120)
        path.unlink()
    waiting.join(120)
    assert seen == [True]


@pytest.mark.parametrize('name', ['ENOSPC', 'EDQUOT'])
def test_no_space_and_a_quota_that_is_used_up_are_one_line(tmp_path, name):
    import errno
    def full(tmp): raise OSError(getattr(errno, name), 'full')
    with pytest.raises(DataUnavailable, match='no space left'): build_folder(tmp_path/'x', full)
    assert files(tmp_path) == []


@pytest.mark.skipif(os.name == 'nt', reason='permissions of POSIX')
def test_what_was_measured_of_decoders_is_for_all_users_and_leaves_nothing(tmp_path, monkeypatch):
    from fastbench.draw import fastest
    monkeypatch.setenv('FASTBENCH_HOME', str(tmp_path))
    fastest._write(dict(a=1))
    kept = tmp_path/'draw'/'decoders.json'
    (tmp_path/'plain').touch()
    assert kept.stat().st_mode == (tmp_path/'plain').stat().st_mode and fastest._read() == dict(a=1)
    def deny(*args): raise PermissionError(1, 'a file of another user, in a folder with the sticky bit')
    monkeypatch.setattr(os, 'replace', deny)
    fastest._write(dict(a=2))
    assert [o.name for o in kept.parent.iterdir()] == ['decoders.json'] and fastest._read() == dict(a=1)


def test_imports_no_torch():
    out = subprocess.run([sys.executable, '-c', 'import sys, fastbench.machine.download, fastbench.vision.sources; '
                          'print([o for o in ("torch", "fastai", "numpy", "sklearn", "urllib.request") if o in sys.modules])'],
                         capture_output=True, text=True, check=True).stdout
    assert out.strip() == '[]'


def test_an_archive_that_is_not_there(tmp_path):
    with pytest.raises(DataUnavailable, match='none.zip is not there'): unpack(tmp_path/'none.zip', tmp_path/'out')
    assert not (tmp_path/'out').exists()
    (tmp_path/'set').mkdir()
    (tmp_path/'file').write_text('x')
    with pytest.raises(DataUnavailable, match='none.zip is not there'): unpack(tmp_path/'none.zip', tmp_path/'set', redo=True)
    with pytest.raises(DataUnavailable, match='none.zip is not there'): unpack(tmp_path/'none.zip', tmp_path/'file')
    with pytest.raises(DataUnavailable, match='set is a folder'): unpack(tmp_path/'set', tmp_path/'out')
    assert unpack(tmp_path/'none.zip', tmp_path/'set') == tmp_path/'set'


def test_a_text_is_no_archive(tmp_path):
    (tmp_path/'notes.zip').write_text('notes')
    with pytest.raises(DataUnavailable, match='notes.zip is not an archive') as e: unpack(tmp_path/'notes.zip', tmp_path/'out')
    assert 'truncated' not in str(e.value)


def test_a_folder_where_the_file_is_to_be(tmp_path):
    (tmp_path/'a').write_text('x')
    (tmp_path/'there').mkdir()
    with pytest.raises(DataUnavailable, match='there is a folder'): fetch((tmp_path/'a').as_uri(), tmp_path/'there')


def test_the_address_is_said_to_be_of_another_kind(tmp_path):
    with pytest.raises(DataUnavailable, match="begins with https:, http: or file:, and not with 'ftp'"): fetch('ftp://x/y', tmp_path/'y')


def test_a_look_for_no_file_finds_nothing():
    from fastbench.machine.hub import look_up
    with pytest.raises(ValueError, match='no file'): look_up('gpt2', [])
