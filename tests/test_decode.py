"Decoders: a golden set of awkward files, made here; what fastai makes of each is right, for every decoder, or the file is named in one line"
import io
import json
import struct
import warnings
import zlib

import numpy as np
import pytest
from fastai.vision.core import PILImage, PILImageBW
from PIL import Image

from fastbench.draw import fastest
from fastbench.draw.decode import CorruptImage, Decoder, Scratch, decode, decoder, decoders, get_decoder, jpeg_header, read_header
from fastbench.draw.fastest import choose_decoder, sample_jpegs, time_decoders
from fastbench.errors import UserError

HERE = [o.name for o in decoders.values() if not o.missing()]


def photo(w=101, h=75, seed=0):
    "Soft shapes: what subsampling of colour makes of hard edges is not the point"
    rng, y, x = np.random.default_rng(seed), *np.mgrid[:h, :w]
    waves = sum(np.sin((x*a + y*b)[..., None]/12 + np.arange(3)) for a, b in rng.uniform(.1, 1, (6, 2)))
    return Image.fromarray((128 + 18*waves).clip(0, 255).astype('uint8'))


def saved(im, format='JPEG', **kwargs):
    f = io.BytesIO()
    im.save(f, format, **kwargs)
    return f.getvalue()


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(photo(), exif=exif, quality=95)


def animated(format): return saved(photo(), format, save_all=True, append_images=[photo(seed=1), photo(seed=2)])
def gray16(): return saved(Image.fromarray((np.arange(75*101, dtype='uint32').reshape(75, 101)*8).astype('uint16')), 'PNG')
def palette(**kwargs): return saved(photo().quantize(16), 'PNG', **kwargs)


def see_through(mode):
    im = photo().convert(mode)
    im.putalpha(Image.fromarray(np.linspace(0, 255, 101*75).reshape(75, 101).astype('uint8')))
    return saved(im, 'PNG')


def filled(data):
    "Fill bytes before a marker, which the format allows"
    at = data.index(b'\xff\xdb')
    return data[:at] + b'\xff\xff' + data[at:]


GOLDEN = dict(
    plain=lambda: saved(photo(), quality=92), progressive=lambda: saved(photo(), progressive=True), full_colour=lambda: saved(photo(), subsampling=0),
    coded_rgb=lambda: saved(photo(), keep_rgb=True), turned=turned, gray=lambda: saved(photo().convert('L')), cmyk=lambda: saved(photo().convert('CMYK')),
    restarts=lambda: saved(photo(), restart_marker_blocks=3), fill_bytes=lambda: filled(saved(photo())), garbage_after=lambda: saved(photo()) + b'garbage'*20,
    commented=lambda: saved(photo(), comment=b'\xff\xc0'*500), one_pixel=lambda: saved(photo(1, 1)), thin=lambda: saved(photo(301, 3)),
    mpo=lambda: saved(photo(), 'MPO', save_all=True, append_images=[photo(seed=1)]), renamed=lambda: saved(photo(), 'PNG'), gray16=gray16, palette=palette,
    palette_transparent=lambda: palette(transparency=bytes(range(0, 256, 16))), one_bit=lambda: saved(photo().convert('1'), 'PNG'), rgba=lambda: see_through('RGBA'),
    gray_alpha=lambda: see_through('LA'), gif=lambda: animated('GIF'), apng=lambda: animated('PNG'), webp=lambda: animated('WEBP'), tiff=lambda: saved(photo(), 'TIFF'),
    bmp=lambda: saved(photo(), 'BMP'))


def as_fastai(data, gray):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return np.asarray((PILImageBW if gray else PILImage).create(data))


@pytest.fixture
def home(tmp_path, monkeypatch):
    "An empty cache and a process that knows nothing"
    monkeypatch.setenv('FASTBENCH_HOME', str(tmp_path))
    monkeypatch.setattr(fastest, '_measured', {})
    return tmp_path/'draw/decoders.json'


def one_line(e): assert '\n' not in str(e.value), str(e.value); return str(e.value)


# What every decoder makes of a file

@pytest.mark.filterwarnings('ignore:Palette images')
@pytest.mark.parametrize('gray', [False, True], ids=['colour', 'gray'])
@pytest.mark.parametrize('kind', GOLDEN)
@pytest.mark.parametrize('name', HERE)
def test_golden(name, kind, gray):
    data = GOLDEN[kind]()
    want, got = as_fastai(data, gray), decode(data, decoders[name], gray=gray)
    assert got.dtype == np.uint8 and got.ndim == 3 and got.shape[2] == (1 if gray else 3)
    got = got[..., 0] if gray else got
    assert got.shape == want.shape == as_fastai(data, gray).shape
    head = read_header(data)
    assert (head.height, head.width) == want.shape[:2]
    if decoders[name].exact or not head.plain: assert np.array_equal(got, want)
    assert np.abs(got.astype(int) - want).mean() < 1


@pytest.mark.parametrize('kind', ['plain', 'progressive', 'gray', 'thin', 'one_pixel', 'coded_rgb'])
@pytest.mark.parametrize('divisor', [2, 4, 8])
@pytest.mark.parametrize('name', HERE)
def test_smaller_ones_are_the_same_picture(name, divisor, kind):
    data = GOLDEN[kind]()
    want, got = as_fastai(data, False), decode(data, decoders[name], divisor)
    if divisor not in decoders[name].divisors: assert got.shape == want.shape
    elif kind != 'thin': assert got.shape[:2] == tuple(-(-o//divisor) for o in want.shape[:2])
    d = round(want.shape[1]/got.shape[1])  # Pillow's draft takes a smaller divisor where a side is very short
    h, w = want.shape[0]//d, want.shape[1]//d  # without the blocks at the edge that reach over it
    small = want[:h*d, :w*d].reshape(h, d, w, d, 3).mean((1, 3))
    assert not small.size or np.abs(got[:h, :w] - small).mean() < 3


SUBSAMPLED = {o: (lambda o=o: saved(photo(400, 350), quality=92, subsampling=o)) for o in ('4:4:4', '4:2:2', '4:2:0')} | dict(
    large_progressive=lambda: saved(photo(400, 350), progressive=True), large_gray=lambda: saved(photo(400, 350).convert('L')), large_restarts=lambda: saved(photo(400, 350), restart_marker_blocks=3))


@pytest.mark.filterwarnings('ignore:Palette images')
@pytest.mark.parametrize('gray', [False, True], ids=['colour', 'gray'])
@pytest.mark.parametrize('kind', [*SUBSAMPLED, *GOLDEN])
@pytest.mark.parametrize('name', HERE)
def test_rows_that_are_needed_are_the_same(name, kind, gray):
    data = (SUBSAMPLED | GOLDEN)[kind]()
    for divisor in (1, 2, 4, 8):
        want = decode(data, decoders[name], divisor, gray)
        d = round(read_header(data).height/len(want))
        for rows in (1, 8, 31, 32, 33, 47, 73, 75, 200, 333, 349):
            got = decode(data, decoders[name], divisor, gray, rows=rows, scratch=Scratch())
            n = min(-(-rows//d), len(want))
            assert len(got) >= n and np.array_equal(got[:n], want[:n]), (divisor, rows)


@pytest.mark.parametrize('name', [o for o in HERE if decoders[o].stops])
def test_rows_below_are_not_decoded(name):
    data = SUBSAMPLED['4:2:0']()
    for divisor in (1, 2, 4, 8): assert len(decode(data, decoders[name], divisor, rows=96)) == 96//divisor + 2


# What cannot be read

def png_of(w, h):
    "A PNG that claims a size"
    def chunk(kind, body): return struct.pack('>I', len(body)) + kind + body + struct.pack('>I', zlib.crc32(kind + body))
    return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', w, h, 8, 2, 0, 0, 0)) + chunk(b'IDAT', zlib.compress(b'')) + chunk(b'IEND', b'')


def jpeg_of(w, h):
    "A JPEG that claims a size"
    data = bytearray(saved(photo()))
    i = data.index(b'\xff\xc0')
    data[i+5:i+9] = struct.pack('>HH', h, w)
    return bytes(data)


CORRUPT = dict(
    empty=(lambda: b'', 'the file is empty'), text=(lambda: b'hello', 'not that of an image'), html=(lambda: b'<html>404</html>', 'not that of an image'),
    only_start=(lambda: saved(photo())[:3], 'not that of an image'), header_only=(lambda: saved(photo())[:200], 'runcated|not that of an image|broken'),
    half=(lambda: saved(photo())[:900], 'truncated'), nearly_whole=(lambda: saved(photo(400, 350), quality=95)[:-600], 'truncated'), half_png=(lambda: saved(photo(), 'PNG')[:2000], 'truncated|broken'),
    half_progressive=(lambda: saved(photo(), progressive=True)[:900], 'truncated'),
    bomb_png=(lambda: png_of(40_000, 40_000), 'exceeds limit'), bomb_jpeg=(lambda: jpeg_of(65_000, 65_000), 'exceeds limit'))


@pytest.mark.parametrize('kind', CORRUPT)
@pytest.mark.parametrize('name', HERE)
def test_what_cannot_be_read_is_named(name, kind):
    make, why = CORRUPT[kind]
    said = set()
    for divisor in (1, 2):
        for rows in (0, 20):
            with pytest.raises(CorruptImage, match=why) as e: decode(make(), decoders[name], divisor, name='cats/12.jpg', rows=rows)
            said.add(one_line(e))
    with pytest.raises(CorruptImage) as e: decode(make(), name='cats/12.jpg')
    assert said == {one_line(e)} and 'cats/12.jpg: ' in one_line(e) and 'BytesIO' not in one_line(e)


def test_a_decoder_that_fails_leaves_the_file_to_pillow():
    def broken(data, divisor, gray): raise ValueError('no')
    data = GOLDEN['plain']()
    assert np.array_equal(decode(data, Decoder('broken', broken, formats=('jpeg',)), 2), decode(data))


def test_pillows_own_limits_hold_for_all(monkeypatch):
    "Who allows truncated files gets them from every decoder; who lowers the limit of pixels is obeyed"
    from PIL import ImageFile
    data = CORRUPT['half'][0]()
    monkeypatch.setattr(ImageFile, 'LOAD_TRUNCATED_IMAGES', True)
    want = decode(data)
    for o in HERE: assert np.array_equal(decode(data, decoders[o]), want)
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 100)
    for o in HERE:
        with pytest.raises(CorruptImage, match='exceeds limit'): decode(GOLDEN['plain'](), decoders[o])


def test_headers_of_damaged_jpegs_never_run_off():
    data, rng = GOLDEN['plain'](), np.random.default_rng(0)
    for i in range(len(data)): jpeg_header(data[:i])
    for _ in range(2000):
        bad = bytearray(data)
        bad[rng.integers(2, 400)] = rng.integers(256)
        jpeg_header(bytes(bad))


def test_a_damaged_jpeg_is_read_as_pillow_reads_it_or_named():
    data, rng = GOLDEN['plain'](), np.random.default_rng(1)
    for _ in range(150):
        bad = bytearray(data)
        bad[rng.integers(2, len(data))] = rng.integers(256)
        seen = set()
        for o in HERE:
            if o == 'torchvision': continue  # does not say what libjpeg warned of
            for rows in (0, 40) if decoders[o].stops else (0,):
                try: seen.add(decode(bytes(bad), decoders[o], rows=rows)[:40].tobytes())
                except CorruptImage as e: seen.add(str(e))
        assert len(seen) == 1


@pytest.mark.parametrize('name', [o for o in HERE if decoders[o].stops])
def test_a_marker_among_the_pixels_is_not_overlooked(name):
    "libjpeg only says so when the image ends, and a decoder told to ignore warnings does not pass it on"
    data = SUBSAMPLED['4:2:0']()
    bad = data[:2000] + b'\xff\x33' + data[2002:]
    for rows in (0, 96):
        with pytest.raises(CorruptImage, match='broken data stream'): decode(bad, decoders[name], rows=rows)


# Names

def test_unknown_and_missing_decoders():
    with pytest.raises(UserError, match="did you mean 'simplejpeg'") as e: get_decoder('simplejpg')
    assert one_line(e)
    try:
        decoder('nowhere', missing=lambda: 'nowhere is not installed: pip install nowhere')(None)
        with pytest.raises(UserError, match="decoder='nowhere' cannot be used: nowhere is not installed") as e: choose_decoder('nowhere')
        assert one_line(e) and 'nowhere' not in time_decoders(rounds=1)
    finally: del decoders['nowhere']


def test_a_decoder_that_does_not_know_files_of_red_green_and_blue_leaves_them_to_pillow():
    "nvJPEG takes them for brightness and colour, as most files have it"
    assert not decoders['nvjpeg'].rgb and read_header(GOLDEN['coded_rgb']()).rgb
    assert not any(read_header(GOLDEN[o]()).rgb for o in GOLDEN if o != 'coded_rgb')
    wrong = Decoder('wrong', lambda data, divisor, gray: np.zeros((1, 1, 3), 'uint8'), formats=('jpeg',), rgb=False)
    for kind, size in dict(coded_rgb=75, plain=1).items(): assert len(decode(GOLDEN[kind](), wrong)) == size


def without_nvjpeg():
    if why := decoders['nvjpeg'].missing(): pytest.skip(why)


@pytest.mark.filterwarnings('ignore:Palette images')
@pytest.mark.parametrize('kind', GOLDEN)
def test_nvjpeg_of_cuda(kind):
    without_nvjpeg()
    test_golden('nvjpeg', kind, False)
    test_golden('nvjpeg', kind, True)


@pytest.mark.parametrize('process,gpus,own', [('', 2, 0), ('1', 2, 1), ('1', 1, 0)])  # the last: each process sees its own GPU alone
def test_nvjpeg_decodes_on_the_gpu_of_its_process(monkeypatch, process, gpus, own):
    from fastbench.draw.decode import _stream
    monkeypatch.setenv('LOCAL_RANK', process)
    monkeypatch.setattr('torch.cuda.device_count', lambda: gpus)
    monkeypatch.setattr('torch.cuda.Stream', lambda device=None: device)
    assert _stream.__wrapped__() == own


def test_nvjpeg_of_cuda_waits_for_no_training():
    import torch
    without_nvjpeg()
    data = GOLDEN['plain']()
    decode(data, decoders['nvjpeg'])
    torch.cuda._sleep(4*10**9)  # cycles: two seconds
    step = torch.cuda.Event()
    step.record()
    decode(data, decoders['nvjpeg'])
    assert not step.query()
    torch.cuda.synchronize()


# The fastest

def planted(monkeypatch, **rates):
    asked = []
    monkeypatch.setattr(fastest, 'time_decoders', lambda divisor=2, **kwargs: asked.append(divisor) or rates)
    return asked


def test_auto_counts_what_all_threads_share_once(home, monkeypatch):
    planted(monkeypatch, nvjpeg=900, pillow=500)
    monkeypatch.setattr(fastest, 'worker_cores', lambda: 1)
    assert choose_decoder().decoder.name == 'nvjpeg'
    monkeypatch.setattr(fastest, 'worker_cores', lambda: 2)
    assert choose_decoder().decoder.name == 'pillow' and 'nvjpeg 450' in str(choose_decoder())


def test_auto_is_measured_once_per_machine(home, monkeypatch):
    asked = planted(monkeypatch, torchvision=900, pillow=500)
    got = choose_decoder()
    assert got.decoder.name == 'torchvision' and '900' in str(got) and 'pillow 500' in str(got)
    assert choose_decoder() == got and asked == [2]
    monkeypatch.setattr(fastest, '_measured', {})  # another process
    assert choose_decoder() == got and asked == [2] and len(json.loads(home.read_text())) == 1
    monkeypatch.setattr(fastest, 'version', lambda o: '99')
    choose_decoder()
    assert asked == [2, 2]
    choose_decoder(again=True)
    assert asked == [2, 2, 2]


@pytest.mark.parametrize('kept', ['', '[]', '{"a": ', 'null', '7'])
def test_a_damaged_note_is_measured_anew(home, monkeypatch, kept):
    home.parent.mkdir()
    home.write_text(kept)
    asked = planted(monkeypatch, pillow=500)
    assert choose_decoder().decoder.name == 'pillow' and asked == [2]


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path/'file').write_text('')
    monkeypatch.setenv('FASTBENCH_HOME', str(tmp_path/'file'))
    monkeypatch.setattr(fastest, '_measured', {})
    asked = planted(monkeypatch, pillow=500)
    assert choose_decoder().decoder.name == choose_decoder().decoder.name == 'pillow' and asked == [2]


def test_exact_is_pillow(home):
    assert choose_decoder(exact=True).decoder.name == choose_decoder('pillow', exact=True).decoder.name == 'pillow'
    with pytest.raises(UserError, match='cannot be exact') as e: choose_decoder('simplejpeg', exact=True)
    assert one_line(e)


def test_samples_are_what_the_bar_is_about():
    data = sample_jpegs()
    assert all(60_000 < len(o) < 90_000 and read_header(o).width == 400 for o in data)
