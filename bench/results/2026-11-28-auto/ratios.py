import json,sys,collections,statistics as st,random
g=collections.defaultdict(lambda: collections.defaultdict(dict))
bad=[]
for f in sys.argv[1:]:
    for r in json.load(open(f)):
        k=(r['profile'],r['loss_pct'],r['known'],r['size'] or r['seconds'])
        if not r['ok'] and not r['cut']: bad.append((k,r['transport'],r['error'])); continue
        g[k][r['transport']][(f,r['run'])]=r['goodput_mbps']
for k,t in sorted(g.items(),key=str):
    m={x:st.median(v.values()) for x,v in t.items()}
    plain=[m[x] for x in ('tcp-cubic','tcp-bbr') if x in m]
    if 'hook:auto' not in m or not plain: continue
    best=max(plain); a=m['hook:auto']
    mean={x:len(v)/sum(1/y for y in v.values()) for x,v in t.items()}
    bm=max(mean[x] for x in ('tcp-cubic','tcp-bbr') if x in mean)
    # bootstrap interval of the ratio of medians
    rs=[]
    for _ in range(400):
        mm={x:st.median(random.choices(list(v.values()),k=len(v))) for x,v in t.items()}
        rs.append(mm['hook:auto']/max(mm[x] for x in ('tcp-cubic','tcp-bbr') if x in mm))
    rs.sort()
    print(f"{k[0]:12} {k[1]:3.0f} % {'known' if k[2] else 'new  '} {k[3]:>8}: "+", ".join(f"{x} {m[x]:.3f}" for x in sorted(m))+f"  ratio of medians {a/best:.3f} ({rs[20]:.2f}-{rs[379]:.2f}), of mean times {mean['hook:auto']/bm:.3f}  n={len(t['hook:auto'])}")
print(bad[:5],len(bad))
